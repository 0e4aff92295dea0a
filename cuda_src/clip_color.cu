// Changes of colour on RGB clips, and what comes after them: normalisation, dtype and layout, for several clips in one launch. One
// pass over the pixels; where contrast needs each frame's mean, sums of its greys come first: from clip_resize.cu with the pixels,
// or from a pass of their own. The truth it must equal is gpupipe/data/transform/adjust.py.
//
// Sums are of one order, whatever the GPU: each thread adds its own, a tree adds the threads.
#include "color.cuh"
#include "store.cuh"

constexpr int kThreads = 256;
constexpr int kMaxClips = 8;
constexpr int kPixels = 4;  // that a thread makes together

struct ColorJob {
  unsigned long long rgb;   // (frames, 3, pixels): float32, or 16 bits of [0, 1]
  unsigned long long sums;  // (frames, sums_a_frame) float32: of the greys before contrast
  unsigned long long out;
  long long stride_time, stride_channel, stride_row, stride_column;  // of out, in elements
  float gain[3], bias[3];                                            // value = RGB * gain + bias
  ColorSteps steps;
  int is_float;      // what rgb holds
  int width, pixels;
  int sums_a_frame;  // 0: no contrast
  int first_frame;   // among those of the launch
  int unused;
};

struct ColorBatch {
  ColorJob clips[kMaxClips];
  int count;
  int blocks;  // of a frame
};
static_assert(sizeof(ColorJob) == 152, "gpupipe/data/transform/finish.py packs this struct");
static_assert(sizeof(ColorBatch) == 1224, "gpupipe/data/transform/finish.py packs this struct");

extern __shared__ double shared_memory[];

__device__ __forceinline__ const ColorJob& job_of(const ColorBatch& batch) {
  int number = batch.count - 1;
  while (static_cast<int>(blockIdx.y) < batch.clips[number].first_frame) --number;
  return batch.clips[number];
}

__device__ __forceinline__ float unit_of(unsigned int code) {
  return (__uint_as_float(0x4B000000u | code) - 8388608.f) * (1.f / 65535.f);
}

// Some neighbouring pixels of one channel. A frame's first one lies at a multiple of four where it has such a number of pixels.
__device__ __forceinline__ void load(const ColorJob& job, long long at, bool whole, int count, float (&values)[kPixels]) {
  if (job.is_float) {
    const float* from = reinterpret_cast<const float*>(job.rgb) + at;
#pragma unroll
    for (int k = 0; k < kPixels; ++k) values[k] = k < count ? from[k] : 0.f;
    return;
  }
  const unsigned short* from = reinterpret_cast<const unsigned short*>(job.rgb) + at;
  if (whole) {
    const uint2 words = *reinterpret_cast<const uint2*>(from);
    values[0] = unit_of(words.x & 0xFFFFu);
    values[1] = unit_of(words.x >> 16);
    values[2] = unit_of(words.y & 0xFFFFu);
    values[3] = unit_of(words.y >> 16);
    return;
  }
#pragma unroll
  for (int k = 0; k < kPixels; ++k) values[k] = k < count ? unit_of(from[k]) : 0.f;
}

__device__ __forceinline__ void load_pixels(const ColorJob& job, int pixel, Rgb (&pixels)[kPixels]) {
  const int frame = blockIdx.y - job.first_frame, count = min(kPixels, job.pixels - pixel);
  const bool whole = job.pixels % kPixels == 0;
  float channels[3][kPixels];
#pragma unroll
  for (int channel = 0; channel < 3; ++channel)
    load(job, (3LL * frame + channel) * job.pixels + pixel, whole, count, channels[channel]);
#pragma unroll
  for (int k = 0; k < kPixels; ++k) pixels[k] = {channels[0][k], channels[1][k], channels[2][k]};
}

// The sum over the block's threads, for all of them.
__device__ __forceinline__ float sum_of_threads(float value) {
  float* sums = reinterpret_cast<float*>(shared_memory);
  sums[threadIdx.x] = value;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  __syncthreads();
  return sums[0];
}

// Only for a clip that is alone: of the greys of its pixels as they are.
extern "C" __global__ void __launch_bounds__(kThreads) color_sums(const __grid_constant__ ColorBatch batch) {
  const ColorJob& job = job_of(batch);
  float sum = 0.f;
  for (int pixel = kPixels * (blockIdx.x * kThreads + threadIdx.x); pixel < job.pixels; pixel += kPixels * batch.blocks * kThreads) {
    Rgb pixels[kPixels];
    load_pixels(job, pixel, pixels);
    change(job.steps, pixels, 0.f);
#pragma unroll
    for (int k = 0; k < kPixels; ++k) sum += pixel + k < job.pixels ? grey_of(pixels[k]) : 0.f;
  }
  sum = sum_of_threads(sum);
  if (threadIdx.x == 0)
    reinterpret_cast<float*>(job.sums)[(blockIdx.y - job.first_frame) * job.sums_a_frame + blockIdx.x] = sum;
}

template <typename Out>
__device__ __forceinline__ void finish(const ColorBatch& batch) {
  const ColorJob& job = job_of(batch);
  const int frame = blockIdx.y - job.first_frame;
  float mean = 0.f;
  if (job.sums_a_frame > 0) {
    const float* sums = reinterpret_cast<const float*>(job.sums) + static_cast<long long>(frame) * job.sums_a_frame;
    for (int k = threadIdx.x; k < job.sums_a_frame; k += kThreads) mean += sums[k];
    mean = sum_of_threads(mean) / static_cast<float>(job.pixels);
  }
  Out* out = reinterpret_cast<Out*>(job.out) + frame * job.stride_time;
  for (int pixel = kPixels * (blockIdx.x * kThreads + threadIdx.x); pixel < job.pixels; pixel += kPixels * batch.blocks * kThreads) {
    Rgb pixels[kPixels];
    load_pixels(job, pixel, pixels);
    change(job.steps, pixels, mean);
    int row = pixel / job.width, column = pixel % job.width;
#pragma unroll
    for (int k = 0; k < kPixels; ++k) {
      if (pixel + k >= job.pixels) break;
      Out* at = out + row * job.stride_row + column * job.stride_column;
      store(at, pixels[k].r * job.gain[0] + job.bias[0]);
      store(at + job.stride_channel, pixels[k].g * job.gain[1] + job.bias[1]);
      store(at + 2 * job.stride_channel, pixels[k].b * job.gain[2] + job.bias[2]);
      if (++column == job.width) {
        column = 0;
        ++row;
      }
    }
  }
}

#define ENTRY(name, out)                                                                                  \
  extern "C" __global__ void __launch_bounds__(kThreads) name(const __grid_constant__ ColorBatch batch) { \
    finish<out>(batch);                                                                                   \
  }
ENTRY(color_float32, float)
ENTRY(color_float16, __half)
ENTRY(color_bfloat16, __nv_bfloat16)
ENTRY(color_uint8, unsigned char)
