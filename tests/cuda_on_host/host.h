// Enough of CUDA to run one of our kernels on the host: threads of a block are fibres that take turns at __syncthreads.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

using std::max;
using std::min;

struct Index {
  int x = 0, y = 0, z = 0;
};
inline Index threadIdx, blockIdx;
constexpr int kSharedDoubles = 8192;  // 64 KB
double shared_memory[kSharedDoubles];

// A texture of texels of 32 or 64 bits with point filter: what a handle points to. A right kernel fetches nothing outside.
using cudaTextureObject_t = unsigned long long;
struct Texture {
  const void* data;
  int width, rows, pitch;  // in texels
};
inline int fetches_outside = 0;

template <typename Texel>
Texel tex2D(cudaTextureObject_t handle, float x, float y) {
  const Texture& texture = *reinterpret_cast<const Texture*>(handle);
  const int column = static_cast<int>(std::floor(x)), row = static_cast<int>(std::floor(y));
  if (column < 0 || column >= texture.width || row < 0 || row >= texture.rows) {
    ++fetches_outside;
    return {};
  }
  return static_cast<const Texel*>(texture.data)[static_cast<long>(row) * texture.pitch + column];
}

inline float __uint_as_float(unsigned int bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline unsigned int __byte_perm(unsigned int low, unsigned int high, unsigned int selector) {
  const unsigned long long bytes = static_cast<unsigned long long>(high) << 32 | low;
  unsigned int result = 0;
  for (int k = 0; k < 4; ++k) result |= static_cast<unsigned int>(bytes >> 8 * (selector >> 4 * k & 7) & 255) << 8 * k;
  return result;
}
struct uint2 {
  unsigned int x, y;
};
struct uint4 {
  unsigned int x, y, z, w;
};
struct float2 {
  float x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline void atomicAdd(int* at, int value) { *at += value; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline double __dadd_rn(double x, double y) { return x + y; }
inline float __saturatef(float x) { return x > 0.f ? min(x, 1.f) : 0.f; }
inline float __fdividef(float x, float y) { return x / y; }
struct float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline unsigned int __float2uint_rn(float value) { return static_cast<unsigned int>(std::nearbyint(value)); }

struct Fibre {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(128 * 1024);
  Index thread;
  bool done = false;
};
inline ucontext_t scheduler;
inline Fibre* running;
inline void __syncthreads() { swapcontext(&running->context, &scheduler); }
inline void __syncwarp() { __syncthreads(); }

template <typename Params>
struct Job {
  static inline void (*kernel)(Params);
  static inline const Params* params;
  static void enter() {
    kernel(*params);
    running->done = true;
    swapcontext(&running->context, &scheduler);
  }
};

template <typename Params>
void run_block(Fibre* fibres, Index block) {
  const int threads = block.x * block.y;
  for (int t = 0; t < threads; ++t) {
    Fibre& fibre = fibres[t];
    fibre.done = false;
    fibre.thread = {t % block.x, t / block.x, 0};
    getcontext(&fibre.context);
    fibre.context.uc_stack.ss_sp = fibre.stack.data();
    fibre.context.uc_stack.ss_size = fibre.stack.size();
    fibre.context.uc_link = nullptr;
    makecontext(&fibre.context, &Job<Params>::enter, 0);
  }
  for (bool left = true; left;) {
    left = false;
    for (int t = 0; t < threads; ++t) {
      if (fibres[t].done) continue;
      running = &fibres[t];
      threadIdx = running->thread;
      swapcontext(&scheduler, &running->context);
      left |= !running->done;
    }
  }
}

// Runs the whole grid.
template <typename Params>
void run_grid(void (*kernel)(Params), const Params* params, Index grid, Index block) {
  static std::vector<Fibre> fibres(1024);
  Job<Params>::kernel = kernel;
  Job<Params>::params = params;
  for (blockIdx.z = 0; blockIdx.z < grid.z; ++blockIdx.z)
    for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y)
      for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) {
        std::fill(shared_memory, shared_memory + kSharedDoubles, NAN);  // shared memory starts out with anything
        run_block<Params>(fibres.data(), block);
      }
}
