// Instructions that CUDA C++ has no name for. Where kernels run on the host, tests/cuda_on_host/host.h has their equals.
//
// A matrix product's operands lie in a warp's registers; with g = lane / 4 and t = lane % 4 a lane holds, by PTX's definition:
//   d (16, 8):            d[0], d[1] = (g, 2t), (g, 2t + 1);  d[2], d[3] = the same of row g + 8
//   a (16, 16) of halves: x = (g, 2t and 2t + 1), y = those of row g + 8, z and w = the same of columns + 8
//   b (16, 8) of halves:  b0 = (2t and 2t + 1, g), b1 = rows + 8
//   a (16, 8) of tf32:    a[0] = (g, t), a[1] = (g + 8, t), a[2] = (g, t + 4), a[3] = (g + 8, t + 4)
//   b (8, 8) of tf32:     b0 = (t, g), b1 = (t + 4, g)
#pragma once

#ifndef GPUPIPE_ON_HOST
// d += a b, of halves, summed in single precision.
__device__ __forceinline__ void multiply_halves(float (&d)[4], const uint4& a, unsigned int b0, unsigned int b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// d += a b, of floats with 10 bits behind the leading one, summed in single precision.
__device__ __forceinline__ void multiply_tf32(float (&d)[4], const float (&a)[4], float b0, float b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
        "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// Has the compiler work out two numbers before whatever follows.
__device__ __forceinline__ void have_now(unsigned int& a, unsigned int& b) { asm volatile("" : "+r"(a), "+r"(b)); }

// x * scale + offset, of two halves each.
__device__ __forceinline__ unsigned int scale_halves(unsigned int x, unsigned int scale, unsigned int offset) {
  unsigned int result;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(x), "r"(scale), "r"(offset));
  return result;
}

// 1 / x within an ulp; numbers below the smallest normal one are zero.
__device__ __forceinline__ float reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// The sum over a warp's lanes, for all of them, always in the same order.
__device__ __forceinline__ float sum_of_lanes(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, distance);
  return value;
}
#endif
