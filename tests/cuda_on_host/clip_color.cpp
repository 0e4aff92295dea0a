// cuda_src/clip_color.cu as a host library.
#include "host.h"

#include "clip_color.cu"

#define RUN(name)                                                                           \
  extern "C" void run_##name(const ColorBatch* p, int gx, int gy, int gz, int bx, int by) { \
    run_grid<ColorBatch>(name, p, Index{gx, gy, gz}, Index{bx, by});                        \
  }
RUN(color_sums)
RUN(color_float32)
RUN(color_float16)
RUN(color_bfloat16)
RUN(color_uint8)
