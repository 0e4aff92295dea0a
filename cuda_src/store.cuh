// A finished value as the output's type: rounded to nearest; 8-bit values are RGB * 255 and held within 0 ... 255.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

__device__ __forceinline__ void store(float* at, float value) { *at = value; }
__device__ __forceinline__ void store(__half* at, float value) { *at = __float2half_rn(value); }
__device__ __forceinline__ void store(__nv_bfloat16* at, float value) { *at = __float2bfloat16_rn(value); }
__device__ __forceinline__ void store(unsigned char* at, float value) {
  *at = static_cast<unsigned char>(__float2uint_rn(fminf(fmaxf(value, 0.f), 255.f)));
}
__device__ __forceinline__ void store(unsigned short* at, float value) {
  *at = static_cast<unsigned short>(__float2uint_rn(fminf(fmaxf(value, 0.f), 65535.f)));
}
