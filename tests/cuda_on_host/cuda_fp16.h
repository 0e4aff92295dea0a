// Half precision for kernels that run on the host.
#pragma once
#include <cstring>
using __half = _Float16;
struct __half2 {
  __half x, y;
};
inline __half __float2half_rn(float value) { return static_cast<__half>(value); }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
inline float __half2float(__half value) { return static_cast<float>(value); }
inline unsigned short __half_as_ushort(__half value) {
  unsigned short bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
