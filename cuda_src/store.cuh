// Finished values as the output's type: rounded to nearest; 8-bit values are RGB * 255 and held within 0 ... 255. What is kept in
// 16 bits of [0, 1] comes as 2^23 + RGB * 65535, whose low bits as a float are that number, rounded.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

__device__ __forceinline__ unsigned int code_of(float value) { return __float2uint_rn(fminf(fmaxf(value, 0.f), 255.f)); }

__device__ __forceinline__ void store(float* at, float value) { *at = value; }
__device__ __forceinline__ void store(__half* at, float value) { *at = __float2half_rn(value); }
__device__ __forceinline__ void store(__nv_bfloat16* at, float value) { *at = __float2bfloat16_rn(value); }
__device__ __forceinline__ void store(unsigned char* at, float value) { *at = static_cast<unsigned char>(code_of(value)); }
__device__ __forceinline__ void store(unsigned short* at, float value) {
  *at = static_cast<unsigned short>(__float_as_uint(value));
}

// Two neighbours, the first at a multiple of two elements.
__device__ __forceinline__ void store_two(float* at, float first, float second) {
  *reinterpret_cast<float2*>(at) = make_float2(first, second);
}
__device__ __forceinline__ void store_two(__half* at, float first, float second) {
  *reinterpret_cast<__half2*>(at) = __floats2half2_rn(first, second);
}
__device__ __forceinline__ void store_two(__nv_bfloat16* at, float first, float second) {
  *reinterpret_cast<__nv_bfloat162*>(at) = __floats2bfloat162_rn(first, second);
}
__device__ __forceinline__ void store_two(unsigned char* at, float first, float second) {
  *reinterpret_cast<unsigned short*>(at) = static_cast<unsigned short>(code_of(first) | code_of(second) << 8);
}
__device__ __forceinline__ void store_two(unsigned short* at, float first, float second) {
  *reinterpret_cast<unsigned int*>(at) = __byte_perm(__float_as_uint(first), __float_as_uint(second), 0x5410u);
}

// Eight neighbours, the first at a multiple of eight elements, or of 16 bytes where these are fewer.
__device__ __forceinline__ void store_eight(float* at, const float (&values)[8]) {
  float4* to = reinterpret_cast<float4*>(at);
  to[0] = make_float4(values[0], values[1], values[2], values[3]);
  to[1] = make_float4(values[4], values[5], values[6], values[7]);
}
template <int kBytes>
struct EightOf {
  using Words = uint4;
};
template <>
struct EightOf<1> {
  using Words = uint2;
};
template <typename Out>  // of 8 or 16 bits
__device__ __forceinline__ void store_eight(Out* at, const float (&values)[8]) {
  using Words = typename EightOf<sizeof(Out)>::Words;
  union {
    Words words;
    Out values[8];
  } packed;
#pragma unroll
  for (int k = 0; k < 8; k += 2) store_two(packed.values + k, values[k], values[k + 1]);
  *reinterpret_cast<Words*>(at) = packed.words;
}
