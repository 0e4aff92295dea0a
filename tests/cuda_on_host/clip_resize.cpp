// cuda_src/clip_resize.cu as a host library.
#include "host.h"

#include "clip_resize.cu"

#define RUN(name)                                                                      \
  extern "C" void run_##name(const Batch* p, int gx, int gy, int gz, int bx, int by) { \
    run_grid<Batch>(name, p, Index{gx, gy, gz}, Index{bx, by});                        \
  }
RUN(resize_u8_float32)
RUN(resize_u8_float16)
RUN(resize_u8_bfloat16)
RUN(resize_u8_uint8)
RUN(resize_u16_float32)
RUN(resize_u16_float16)
RUN(resize_u16_bfloat16)
RUN(resize_u16_uint8)
