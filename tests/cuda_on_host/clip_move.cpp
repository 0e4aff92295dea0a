// cuda_src/clip_move.cu as a host library.
#include "host.h"

#include "clip_move.cu"

#define RUN(name)                                                                          \
  extern "C" int run_##name(const MoveBatch* p, int gx, int gy, int gz, int bx, int by) { \
    fetches_outside = 0;                                                                   \
    run_grid<MoveBatch>(name, p, Index{gx, gy, gz}, Index{bx, by});                        \
    return fetches_outside;                                                                \
  }
RUN(move_u8_float32)
RUN(move_u8_float16)
RUN(move_u8_bfloat16)
RUN(move_u8_uint8)
RUN(move_u16_float32)
RUN(move_u16_float16)
RUN(move_u16_bfloat16)
RUN(move_u16_uint8)
RUN(move_u8_texture_float32)
RUN(move_u8_texture_float16)
RUN(move_u8_texture_bfloat16)
RUN(move_u8_texture_uint8)
RUN(move_u16_texture_float32)
RUN(move_u16_texture_float16)
RUN(move_u16_texture_bfloat16)
RUN(move_u16_texture_uint8)
