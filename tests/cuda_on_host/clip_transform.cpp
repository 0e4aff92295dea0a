// cuda_src/clip_transform.cu as a host library.
#include "host.h"

#include "clip_transform.cu"

#define RUN(name)                                                                                                  \
  extern "C" int run_##name(const ClipParams* p, int gx, int gy, int gz, int bx, int by) {                         \
    return run_grid<ClipParams>(name, p, Index{gx, gy, gz}, Index{bx, by}); \
  }
RUN(clip_u8_float32)
RUN(clip_u8_float16)
RUN(clip_u8_bfloat16)
RUN(clip_u8_uint8)
RUN(clip_u16_float32)
RUN(clip_u16_float16)
RUN(clip_u16_bfloat16)
RUN(clip_u16_uint8)
