// cuda_src/clip_blur.cu as a host library.
#include "host.h"

#include "clip_blur.cu"

#define RUN(name)                                                                          \
  extern "C" void run_##name(const BlurBatch* p, int gx, int gy, int gz, int bx, int by) { \
    run_grid<BlurBatch>(name, p, Index{gx, gy, gz}, Index{bx, by});                        \
  }
RUN(blur_float32)
RUN(blur_float16)
RUN(blur_bfloat16)
RUN(blur_uint8)
