// bfloat16 for kernels that run on the host: the upper half of a float, rounded to nearest even.
#pragma once
#include <cstdint>
#include <cstring>
struct __nv_bfloat16 {
  std::uint16_t bits;
};
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return {static_cast<std::uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)};
}
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)}; }
