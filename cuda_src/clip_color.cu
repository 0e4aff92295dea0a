// Changes of colour on RGB clips, and what comes after them: normalisation, dtype and layout. One pass over the pixels; a pass
// before it where contrast needs each frame's mean. The truth it must equal is gpupipe/data/transform/adjust.py.
//
// Sums are of one order, whatever the GPU: each thread adds its own pixels, a tree adds the threads, one thread adds the blocks.
#include "store.cuh"

constexpr int kThreads = 256;
constexpr int kMaxSteps = 8;

enum Kind { kBrightness, kSaturation, kGrayscale, kChannelDrop, kContrast, kHue, kPosterize, kSolarize };

struct ColorJob {
  unsigned long long rgb;   // (frames, 3, pixels) float32 in [0, 1]
  unsigned long long sums;  // (frames, blocks) float32: of the greys before contrast
  unsigned long long out;
  long long stride_time, stride_channel, stride_row, stride_column;  // of out, in elements
  float gain[3], bias[3];                                            // value = RGB * gain + bias
  int width, pixels;
  int blocks;          // of a frame
  int clamp;           // RGB is held within [0, 1] after each step
  int steps, contrast; // how many; which of them is contrast, or -1
  int kind[kMaxSteps];
  float value[kMaxSteps];
};
static_assert(sizeof(ColorJob) == 168, "gpupipe/data/transform/finish.py packs this struct");

extern __shared__ double shared_memory[];

struct Rgb {
  float r, g, b;
};

__device__ __forceinline__ float grey_of(const Rgb& c) { return 0.2989f * c.r + 0.587f * c.g + 0.114f * c.b; }
__device__ __forceinline__ float blend(float one, float other, float share) { return share * one + (1.f - share) * other; }
__device__ __forceinline__ float unit(float x) { return fminf(fmaxf(x, 0.f), 1.f); }

__device__ __forceinline__ float turned(float most, float span, float hue, float phase) {
  const float x = phase + hue;
  const float k = x - 6.f * floorf(x / 6.f);
  return most - span * unit(fminf(k, 4.f - k));
}

__device__ __forceinline__ Rgb turn_hue(const Rgb& c, float turns) {
  const float most = fmaxf(c.r, fmaxf(c.g, c.b)), span = most - fminf(c.r, fminf(c.g, c.b));
  const float safe = span == 0.f ? 1.f : span;
  float hue = 4.f + (c.r - c.g) / safe;
  if (most == c.g) hue = 2.f + (c.b - c.r) / safe;
  if (most == c.r) hue = (c.g - c.b) / safe;
  hue += 6.f * turns;
  return {turned(most, span, hue, 5.f), turned(most, span, hue, 3.f), turned(most, span, hue, 1.f)};
}

__device__ __forceinline__ float posterized(float x, float levels) {
  return fminf(fmaxf(floorf(x * levels), 0.f), levels - 1.f) / levels;
}

// The first `steps` of the steps. `mean` is that of the frame's greys, for contrast.
__device__ __forceinline__ Rgb changed(const ColorJob& job, Rgb c, int steps, float mean) {
  for (int step = 0; step < steps; ++step) {
    const float value = job.value[step];
    switch (job.kind[step]) {
      case kBrightness:
        c = {value * c.r, value * c.g, value * c.b};
        break;
      case kSaturation: {
        const float grey = grey_of(c);
        c = {blend(c.r, grey, value), blend(c.g, grey, value), blend(c.b, grey, value)};
        break;
      }
      case kGrayscale: {
        const float grey = grey_of(c);
        c = {grey, grey, grey};
        break;
      }
      case kChannelDrop:
        c = {value == 0.f ? 0.f : c.r, value == 1.f ? 0.f : c.g, value == 2.f ? 0.f : c.b};
        break;
      case kContrast:
        c = {blend(c.r, mean, value), blend(c.g, mean, value), blend(c.b, mean, value)};
        break;
      case kHue:
        c = turn_hue(c, value);
        break;
      case kPosterize: {
        const float levels = exp2f(value);
        c = {posterized(c.r, levels), posterized(c.g, levels), posterized(c.b, levels)};
        break;
      }
      default:  // kSolarize
        c = {c.r >= value ? 1.f - c.r : c.r, c.g >= value ? 1.f - c.g : c.g, c.b >= value ? 1.f - c.b : c.b};
    }
    if (job.clamp) c = {unit(c.r), unit(c.g), unit(c.b)};
  }
  return c;
}

__device__ __forceinline__ Rgb pixel_of(const ColorJob& job, int pixel) {
  const float* at = reinterpret_cast<const float*>(job.rgb) + 3LL * blockIdx.y * job.pixels + pixel;
  return {at[0], at[job.pixels], at[2LL * job.pixels]};
}

extern "C" __global__ void __launch_bounds__(kThreads) color_sums(const __grid_constant__ ColorJob job) {
  float* sums = reinterpret_cast<float*>(shared_memory);
  float sum = 0.f;
  for (int pixel = blockIdx.x * kThreads + threadIdx.x; pixel < job.pixels; pixel += job.blocks * kThreads)
    sum += grey_of(changed(job, pixel_of(job, pixel), job.contrast, 0.f));
  sums[threadIdx.x] = sum;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) reinterpret_cast<float*>(job.sums)[blockIdx.y * job.blocks + blockIdx.x] = sums[0];
}

template <typename Out>
__device__ __forceinline__ void finish(const ColorJob& job) {
  float* mean = reinterpret_cast<float*>(shared_memory);
  if (threadIdx.x == 0) {
    *mean = 0.f;
    const float* sums = reinterpret_cast<const float*>(job.sums) + blockIdx.y * job.blocks;
    if (job.contrast >= 0) {
      float sum = 0.f;
      for (int block = 0; block < job.blocks; ++block) sum += sums[block];
      *mean = sum / static_cast<float>(job.pixels);
    }
  }
  __syncthreads();
  Out* out = reinterpret_cast<Out*>(job.out) + blockIdx.y * job.stride_time;
  for (int pixel = blockIdx.x * kThreads + threadIdx.x; pixel < job.pixels; pixel += job.blocks * kThreads) {
    const Rgb c = changed(job, pixel_of(job, pixel), job.steps, *mean);
    Out* at = out + pixel / job.width * job.stride_row + pixel % job.width * job.stride_column;
    store(at, c.r * job.gain[0] + job.bias[0]);
    store(at + job.stride_channel, c.g * job.gain[1] + job.bias[1]);
    store(at + 2 * job.stride_channel, c.b * job.gain[2] + job.bias[2]);
  }
}

#define ENTRY(name, out)                                                                              \
  extern "C" __global__ void __launch_bounds__(kThreads) name(const __grid_constant__ ColorJob job) { \
    finish<out>(job);                                                                                 \
  }
ENTRY(color_float32, float)
ENTRY(color_float16, __half)
ENTRY(color_bfloat16, __nv_bfloat16)
ENTRY(color_uint8, unsigned char)
