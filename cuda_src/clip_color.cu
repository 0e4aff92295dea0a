// Changes of colour on RGB clips, and what comes after them: normalisation, dtype and layout, for several clips in one launch. One
// pass over the pixels; where contrast needs each frame's mean, sums of its greys come first: from clip_resize.cu with the pixels,
// or from a pass of their own. The truth it must equal is gpupipe/data/transform/adjust.py.
//
// Sums are of one order, whatever the GPU: of each warp's pixels, which every warp that needs the mean then adds up for itself.
#include "color.cuh"
#include "store.cuh"

constexpr int kThreads = 256;
constexpr int kMaxClips = 8;
constexpr int kPixels = 8;  // that a thread makes together

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
  int frames;  // of all clips
};
static_assert(sizeof(ColorJob) == 152, "gpupipe/data/transform/finish.py packs this struct");
static_assert(sizeof(ColorBatch) == 1224, "gpupipe/data/transform/finish.py packs this struct");

// A thread's pixels, and whose they are.
struct Place {
  const ColorJob& job;
  int frame, pixel, count;
};

// What was written last comes first, since some of it is in the cache still.
__device__ __forceinline__ Place place_of(const ColorBatch& batch) {
  const int frame = batch.frames - 1 - static_cast<int>(blockIdx.y);
  int number = batch.count - 1;
  while (frame < batch.clips[number].first_frame) --number;
  const ColorJob& job = batch.clips[number];
  const int pixel = kPixels * (static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x));
  return {job, frame - job.first_frame, pixel, min(kPixels, job.pixels - pixel)};
}

// One channel of neighbouring pixels as it lies in memory: eight of 16 bits, or four floats and four.
struct Channel {
  uint4 words[2];
};

__device__ __forceinline__ void load(const Place& place, Channel (&channels)[3]) {
  const ColorJob& job = place.job;
  const int bytes = job.is_float ? 4 : 2;
  const bool whole = job.pixels % kPixels == 0 && job.rgb % sizeof(uint4) == 0;
#pragma unroll
  for (int channel = 0; channel < 3; ++channel) {
    channels[channel] = {};
    const long long first = (3LL * place.frame + channel) * job.pixels + place.pixel;
    const char* from = reinterpret_cast<const char*>(job.rgb) + first * bytes;
    if (place.count <= 0) continue;
    if (whole) {
      channels[channel].words[0] = reinterpret_cast<const uint4*>(from)[0];
      if (job.is_float) channels[channel].words[1] = reinterpret_cast<const uint4*>(from)[1];
      continue;
    }
    unsigned int words[8] = {};
#pragma unroll
    for (int k = 0; k < kPixels; ++k) {
      if (k >= place.count) break;
      if (job.is_float)
        words[k] = reinterpret_cast<const unsigned int*>(from)[k];
      else
        words[k / 2] |= static_cast<unsigned int>(reinterpret_cast<const unsigned short*>(from)[k]) << 16 * (k % 2);
    }
    channels[channel] = {{{words[0], words[1], words[2], words[3]}, {words[4], words[5], words[6], words[7]}}};
  }
}

__device__ __forceinline__ unsigned int word_of(const uint4& words, int k) {
  return k == 0 ? words.x : k == 1 ? words.y : k == 2 ? words.z : words.w;
}

__device__ __forceinline__ float float_of(const Channel& channel, int k) {
  return __uint_as_float(word_of(channel.words[k / 4], k % 4));
}

// A number of 16 bits behind the leading bit of 2^23 is a float that much greater.
__device__ __forceinline__ float unit_of(const Channel& channel, int k) {
  const unsigned int word = word_of(channel.words[0], k / 2);
  return (__uint_as_float(__byte_perm(word, 0x4B000000u, k % 2 ? 0x7432u : 0x7410u)) - 8388608.f) * (1.f / 65535.f);
}

__device__ __forceinline__ void unpack(const ColorJob& job, const Channel (&channels)[3], Rgb (&pixels)[kPixels]) {
  if (job.is_float) {
#pragma unroll
    for (int k = 0; k < kPixels; ++k) pixels[k] = {float_of(channels[0], k), float_of(channels[1], k), float_of(channels[2], k)};
    return;
  }
#pragma unroll
  for (int k = 0; k < kPixels; ++k) pixels[k] = {unit_of(channels[0], k), unit_of(channels[1], k), unit_of(channels[2], k)};
}

// Only for a clip that is alone: of the greys of its pixels as they are.
extern "C" __global__ void __launch_bounds__(kThreads) color_sums(const __grid_constant__ ColorBatch batch) {
  const Place place = place_of(batch);
  Channel channels[3];
  Rgb pixels[kPixels];
  load(place, channels);
  unpack(place.job, channels, pixels);
  change(place.job.steps, pixels, 0.f);
  float sum = 0.f;
#pragma unroll
  for (int k = 0; k < kPixels; ++k) sum += k < place.count ? grey_of(pixels[k]) : 0.f;
  sum = sum_of_lanes(sum);
  const int warp = (static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x)) / 32;
  if (threadIdx.x % 32 == 0) reinterpret_cast<float*>(place.job.sums)[place.frame * place.job.sums_a_frame + warp] = sum;
}

// Whether eight pixels of a row can be stored together.
template <typename Out>
__device__ __forceinline__ bool stores_eight(const ColorJob& job) {
  const long long strides = job.stride_time | job.stride_channel | job.stride_row | job.width;
  return job.stride_column == 1 && (strides & (kPixels - 1)) == 0 && job.out % min(sizeof(Out) * kPixels, sizeof(uint4)) == 0;
}

template <typename Out>
__device__ __forceinline__ void finish(const ColorBatch& batch) {
  const Place place = place_of(batch);
  const ColorJob& job = place.job;
  Channel channels[3];
  load(place, channels);
  float mean = 0.f;
  if (job.sums_a_frame > 0) {
    const float* sums = reinterpret_cast<const float*>(job.sums) + static_cast<long long>(place.frame) * job.sums_a_frame;
    constexpr int kTogether = 8;  // loads on their way
    for (int first = threadIdx.x % 32; first < job.sums_a_frame; first += 32 * kTogether) {
      float some[kTogether];
#pragma unroll
      for (int k = 0; k < kTogether; ++k) some[k] = first + 32 * k < job.sums_a_frame ? sums[first + 32 * k] : 0.f;
#pragma unroll
      for (int k = 0; k < kTogether; ++k) mean += some[k];
    }
    mean = sum_of_lanes(mean) / static_cast<float>(job.pixels);
  }
  if (place.count <= 0) return;
  Rgb pixels[kPixels];
  unpack(job, channels, pixels);
  change(job.steps, pixels, mean);
  float values[3][kPixels];
#pragma unroll
  for (int k = 0; k < kPixels; ++k) {
    values[0][k] = pixels[k].r * job.gain[0] + job.bias[0];
    values[1][k] = pixels[k].g * job.gain[1] + job.bias[1];
    values[2][k] = pixels[k].b * job.gain[2] + job.bias[2];
  }
  Out* out = reinterpret_cast<Out*>(job.out) + place.frame * job.stride_time;
  int row = place.pixel / job.width, column = place.pixel - row * job.width;
  if (stores_eight<Out>(job)) {
#pragma unroll
    for (int channel = 0; channel < 3; ++channel)
      store_eight(out + channel * job.stride_channel + row * job.stride_row + column, values[channel]);
    return;
  }
#pragma unroll
  for (int k = 0; k < kPixels; ++k) {
    if (k >= place.count) break;
    Out* at = out + row * job.stride_row + column * job.stride_column;
#pragma unroll
    for (int channel = 0; channel < 3; ++channel) store(at + channel * job.stride_channel, values[channel][k]);
    if (++column == job.width) {
      column = 0;
      ++row;
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
