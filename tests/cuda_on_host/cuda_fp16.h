// Half precision for kernels that run on the host.
#pragma once
using __half = _Float16;
inline __half __float2half_rn(float value) { return static_cast<__half>(value); }
