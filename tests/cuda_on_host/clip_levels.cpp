// cuda_src/clip_levels.cu as a host library.
#include "host.h"

#include "clip_levels.cu"

#define RUN(name)                                                                       \
  extern "C" void run_##name(const Levels* p, int gx, int gy, int gz, int bx, int by) { \
    run_grid<Levels>(name, p, Index{gx, gy, gz}, Index{bx, by});                        \
  }
RUN(levels_autocontrast)
RUN(levels_equalize)
RUN(levels_sharpness)
