// Enough of CUDA to run one of our kernels on the host: threads of a block are fibres that take turns at __syncthreads.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#define GPUPIPE_ON_HOST
#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

using std::abs;
using std::max;
using std::min;

struct Index {
  int x = 0, y = 0, z = 0;
};
inline Index threadIdx, blockIdx;
constexpr int kSharedDoubles = 12288;  // 96 KB
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
inline unsigned int __float_as_uint(float value) {
  unsigned int bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
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
inline float reciprocal(float x) { return 1 / x; }
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

// What a warp does together: each lane leaves its part, and takes what it needs once all have. The next such thing may begin before
// all have taken theirs, so it has another place.
struct Parts {
  unsigned int words[2][1024][8];
  int turns[1024] = {};

  const unsigned int (*exchange(const unsigned int* mine, int count))[8] {
    const int thread = threadIdx.x, turn = turns[thread]++ % 2;
    std::memcpy(words[turn][thread], mine, count * sizeof *mine);
    __syncthreads();
    return words[turn] + thread / 32 * 32;
  }
};
inline Parts parts;

inline float half_of(unsigned int pair, int k) {
  const unsigned short bits = static_cast<unsigned short>(pair >> 16 * k);
  _Float16 value;
  std::memcpy(&value, &bits, sizeof value);
  return static_cast<float>(value);
}

// See cuda_src/machine.cuh for what lies where.
inline void multiply_halves(float (&d)[4], const uint4& a, unsigned int b0, unsigned int b1) {
  const unsigned int mine[] = {a.x, a.y, a.z, a.w, b0, b1};
  const auto all = parts.exchange(mine, 6);
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  for (int k = 0; k < 16; ++k) {
    const int from = k % 8 / 2;
    for (int i = 0; i < 4; ++i) {
      const float weight = half_of(all[4 * g + from][k / 8 * 2 + i / 2], k % 2);
      d[i] += weight * half_of(all[4 * (2 * t + i % 2) + from][4 + k / 8], k % 2);
    }
  }
}
inline void multiply_tf32(float (&d)[4], const float (&a)[4], float b0, float b1) {
  unsigned int mine[6];
  for (int k = 0; k < 4; ++k) mine[k] = __float_as_uint(a[k]) & 0xFFFFE000u;
  mine[4] = __float_as_uint(b0) & 0xFFFFE000u;
  mine[5] = __float_as_uint(b1) & 0xFFFFE000u;
  const auto all = parts.exchange(mine, 6);
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  for (int k = 0; k < 8; ++k)
    for (int i = 0; i < 4; ++i)
      d[i] += __uint_as_float(all[4 * g + k % 4][k / 4 * 2 + i / 2]) *
              __uint_as_float(all[4 * (2 * t + i % 2) + k % 4][4 + k / 4]);
}
inline void have_now(unsigned int&, unsigned int&) {}
inline unsigned int scale_halves(unsigned int x, unsigned int scale, unsigned int offset) {
  unsigned int result = 0;
  for (int k = 0; k < 2; ++k) {
    const _Float16 value = static_cast<_Float16>(half_of(x, k) * half_of(scale, k) + half_of(offset, k));
    unsigned short bits;
    std::memcpy(&bits, &value, sizeof bits);
    result |= static_cast<unsigned int>(bits) << 16 * k;
  }
  return result;
}
inline float sum_of_lanes(float value) {
  const unsigned int mine = __float_as_uint(value);
  const auto all = parts.exchange(&mine, 1);
  float sum = 0;
  for (int lane = 0; lane < 32; ++lane) sum += __uint_as_float(all[lane][0]);
  return sum;
}

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
