// Samples and weights in the forms in which tensor cores take them.
//
// A sample's ten highest bits become the half 1024 + sample, with no conversion: they are the bits behind its leading one. Weights
// add up to one, so what is too much is too much by 1024 in every sum.
#pragma once
#include <cuda_fp16.h>

#include "machine.cuh"

constexpr float kOffset = 1024.f;
constexpr unsigned int kOffsetHalves = 0x64006400u;

// Four samples: two and two, still as they are. A warp's operand has them in a lane's b0 and b1.
struct Pairs {
  unsigned int first, second;
};

// From pairs to halves. Samples of 8 bits come as what they become: Eight has put the bytes in place.
template <typename Word>
struct Bits {
  __device__ __forceinline__ Bits(int, int) {}
  __device__ __forceinline__ unsigned int coarse(unsigned int pair) const { return pair; }
  __device__ __forceinline__ unsigned int fine(unsigned int) const { return 0; }
  __device__ __forceinline__ bool has_fine() const { return false; }
};

// Of 16 bits: `shift` is where the ten highest bits in use begin, and those below are of use too if `fine`. They weigh so little
// that they need weights of one half only.
template <>
struct Bits<unsigned short> {
  int shift;
  unsigned int below;          // those bits of both
  unsigned int scale, offset;  // halves of 2^-shift and -1024 * 2^-shift
  bool with_fine;

  __device__ __forceinline__ Bits(int shift, int fine)
      : shift(shift), below(((1u << shift) - 1) * 0x00010001u), scale(static_cast<unsigned int>(15 - shift) * 0x04000400u),
        offset(static_cast<unsigned int>(25 - shift) * 0x04000400u | 0x80008000u), with_fine(fine != 0) {}
  __device__ __forceinline__ unsigned int coarse(unsigned int pair) const { return (pair >> shift & 0x03FF03FFu) | kOffsetHalves; }
  __device__ __forceinline__ unsigned int fine(unsigned int pair) const {
    return scale_halves((pair & below) | kOffsetHalves, scale, offset);
  }
  __device__ __forceinline__ bool has_fine() const { return with_fine; }
};

// Eight neighbouring samples of one row, or four of U and four of V by turns.
template <typename Word>
struct Eight {
  uint2 words;

  __device__ __forceinline__ void load(const unsigned char* at) { words = *reinterpret_cast<const uint2*>(at); }
  __device__ __forceinline__ void load(const unsigned char* u, const unsigned char* v) {
    const unsigned int four_u = *reinterpret_cast<const unsigned int*>(u), four_v = *reinterpret_cast<const unsigned int*>(v);
    words = {__byte_perm(four_u, four_v, 0x5140u), __byte_perm(four_u, four_v, 0x7362u)};
  }
  __device__ __forceinline__ Pairs four(int half) const {
    const unsigned int word = half == 0 ? words.x : words.y;
    return {__byte_perm(word, kOffsetHalves >> 24, 0x4140u), __byte_perm(word, kOffsetHalves >> 24, 0x4342u)};
  }
  __device__ __forceinline__ Pairs alternate(int plane) const {
    const unsigned int selector = plane == 0 ? 0x4240u : 0x4341u;
    return {__byte_perm(words.x, kOffsetHalves >> 24, selector), __byte_perm(words.y, kOffsetHalves >> 24, selector)};
  }
};

template <>
struct Eight<unsigned short> {
  uint4 words;

  __device__ __forceinline__ void load(const unsigned short* at) { words = *reinterpret_cast<const uint4*>(at); }
  __device__ __forceinline__ void load(const unsigned short* u, const unsigned short* v) {
    const uint2 four_u = *reinterpret_cast<const uint2*>(u), four_v = *reinterpret_cast<const uint2*>(v);
    words = {__byte_perm(four_u.x, four_v.x, 0x5410u), __byte_perm(four_u.x, four_v.x, 0x7632u),
             __byte_perm(four_u.y, four_v.y, 0x5410u), __byte_perm(four_u.y, four_v.y, 0x7632u)};
  }
  __device__ __forceinline__ Pairs four(int half) const {
    return half == 0 ? Pairs{words.x, words.y} : Pairs{words.z, words.w};
  }
  __device__ __forceinline__ Pairs alternate(int plane) const {
    const unsigned int selector = plane == 0 ? 0x5410u : 0x7632u;
    return {__byte_perm(words.x, words.y, selector), __byte_perm(words.z, words.w, selector)};
  }
};

// Two weights as halves, and what these leave of them as halves.
struct Halves {
  unsigned int high, low;
};

__device__ __forceinline__ unsigned int pack_halves(__half first, __half second) {
  return static_cast<unsigned int>(__half_as_ushort(second)) << 16 | __half_as_ushort(first);
}

__device__ __forceinline__ Halves split_halves(float first, float second) {
  const __half a = __float2half_rn(first), b = __float2half_rn(second);
  const __half c = __float2half_rn(first - __half2float(a)), d = __float2half_rn(second - __half2float(b));
  return {pack_halves(a, b), pack_halves(c, d)};
}

constexpr unsigned int kHighBits = 0xFFFFE000u;  // of a float: those that tensor cores look at
__device__ __forceinline__ float high_part(float value) { return __uint_as_float(__float_as_uint(value) & kHighBits); }
