// Gaussian blur of RGB clips, with the changes of colour before it that need each frame's mean, and what comes after it:
// normalisation, dtype and layout, for several clips in one launch. The truth it must equal is blur in
// gpupipe/data/transform/adjust.py.
//
// A block makes a tile of a frame. Each of its warps takes a row of the tile and its surroundings, finishes that row's colours in
// shared memory and sums it across; what came of all rows is then summed down. Sums are of one order, whatever the GPU.
#include "color.cuh"
#include "store.cuh"

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kMaxClips = 8;
constexpr int kDown = 4;  // output rows that a thread sums together: each sample is read once for them

struct BlurJob {
  unsigned long long rgb;   // (frames, 3, height, width): float32, or 16 bits of [0, 1]
  unsigned long long sums;  // (frames, sums_a_frame) float32: of the greys before contrast
  unsigned long long out;
  long long stride_time, stride_channel, stride_row, stride_column;  // of out, in elements
  float gain[3], bias[3];                                            // value = RGB * gain + bias
  ColorSteps steps;                                                  // before the blur
  float sigma;       // standard deviation in pixels
  int is_float;      // what rgb holds
  int sums_a_frame;  // 0: no contrast
  int first_frame;   // among those of the launch
};

struct BlurBatch {
  BlurJob clips[kMaxClips];
  int count;
  int height, width;
  int half;                     // taps on either side of the middle one; less than height and width
  int tile_height, tile_width;  // outputs of a block
  int tiles_across;
  int unused;
};
static_assert(sizeof(BlurJob) == 144, "gpupipe/data/transform/gaussian.py packs this struct");
static_assert(sizeof(BlurBatch) == 1184, "gpupipe/data/transform/gaussian.py packs this struct");

extern __shared__ double shared_memory[];

// The sum over the block's threads, for all of them.
__device__ __forceinline__ float sum_of_threads(float value, float* room) {
  room[threadIdx.x] = value;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < half) room[threadIdx.x] += room[threadIdx.x + half];
  }
  __syncthreads();
  const float sum = room[0];
  __syncthreads();
  return sum;
}

// The picture is mirrored at its outermost pixels, which are not repeated.
__device__ __forceinline__ int mirrored(int place, int size) {
  place = abs(place);
  return place < size ? place : 2 * (size - 1) - place;
}

__device__ __forceinline__ float value_at(const BlurJob& job, long long at) {
  if (job.is_float) return reinterpret_cast<const float*>(job.rgb)[at];
  return static_cast<float>(reinterpret_cast<const unsigned short*>(job.rgb)[at]) * (1.f / 65535.f);
}

template <typename Out>
__device__ __forceinline__ void blur(const BlurBatch& batch) {
  int number = batch.count - 1;
  while (static_cast<int>(blockIdx.y) < batch.clips[number].first_frame) --number;
  const BlurJob& job = batch.clips[number];
  const int frame = blockIdx.y - job.first_frame, half = batch.half;
  const int top = blockIdx.x / batch.tiles_across * batch.tile_height;
  const int left = blockIdx.x % batch.tiles_across * batch.tile_width;
  const int rows = min(batch.tile_height, batch.height - top), columns = min(batch.tile_width, batch.width - left);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;

  // Shared memory: the taps with some zeros on either side; a row's RGB for each warp; and what came of all rows.
  float* taps = reinterpret_cast<float*>(shared_memory);
  float* row_room = taps + 2 * half + 2 * kDown;
  const int span = batch.tile_width + 2 * half;
  float* across = row_room + kWarps * 3 * span;  // (rows, 3, tile_width)
  const int line = 3 * batch.tile_width;

  float mean = 0.f;
  if (job.sums_a_frame > 0) {
    const float* sums = reinterpret_cast<const float*>(job.sums) + static_cast<long long>(frame) * job.sums_a_frame;
    for (int k = thread; k < job.sums_a_frame; k += kThreads) mean += sums[k];
    mean = sum_of_threads(mean, row_room) / static_cast<float>(batch.height * batch.width);
  }
  for (int k = thread; k < 2 * half + 2 * kDown; k += kThreads) {
    const int tap = k - (half + kDown - 1);
    const float distance = static_cast<float>(tap) / job.sigma;
    taps[k] = abs(tap) <= half ? expf(-0.5f * distance * distance) : 0.f;
  }
  __syncthreads();
  const float* middle = taps + half + kDown - 1;
  float sum = 0.f;
  for (int tap = half; tap > 0; --tap) sum += 2.f * middle[tap];  // the smallest first
  sum += middle[0];
  const float norm = 1.f / (sum * sum);

  const long long pixels = static_cast<long long>(batch.height) * batch.width;
  float* mine = row_room + warp * 3 * span;
  for (int row = warp; row < rows + 2 * half; row += kWarps) {
    const long long from = 3 * frame * pixels + static_cast<long long>(mirrored(top + row - half, batch.height)) * batch.width;
    for (int column = lane; column < columns + 2 * half; column += 32) {
      const long long at = from + mirrored(left + column - half, batch.width);
      Rgb pixel[1] = {{value_at(job, at), value_at(job, at + pixels), value_at(job, at + 2 * pixels)}};
      change(job.steps, pixel, mean);
      mine[column] = pixel[0].r;
      mine[span + column] = pixel[0].g;
      mine[2 * span + column] = pixel[0].b;
    }
    __syncwarp();
    for (int item = lane; item < line; item += 32) {
      const int channel = item / batch.tile_width, column = item % batch.tile_width;
      if (column >= columns) continue;
      const float* at = mine + channel * span + column;
      float total = 0.f;
      for (int k = 0; k <= 2 * half; ++k) total += middle[k - half] * at[k];
      across[row * line + item] = total;
    }
    __syncwarp();
  }
  __syncthreads();

  Out* out = reinterpret_cast<Out*>(job.out) + frame * job.stride_time;
  const int groups = (rows + kDown - 1) / kDown;
  for (int item = thread; item < groups * line; item += kThreads) {
    const int first = item / line * kDown, place = item % line;
    const int channel = place / batch.tile_width, column = place % batch.tile_width;
    if (column >= columns) continue;
    float totals[kDown] = {};
    const int end = min(2 * half + kDown, rows + 2 * half - first);
    for (int k = 0; k < end; ++k) {
      const float value = across[(first + k) * line + place];
#pragma unroll
      for (int i = 0; i < kDown; ++i) totals[i] += middle[k - half - i] * value;
    }
    const float gain = job.gain[channel] * norm, bias = job.bias[channel];
    Out* at = out + channel * job.stride_channel + (top + first) * job.stride_row + (left + column) * job.stride_column;
#pragma unroll
    for (int i = 0; i < kDown; ++i)
      if (first + i < rows) store(at + i * job.stride_row, totals[i] * gain + bias);
  }
}

#define ENTRY(name, out)                                                                                 \
  extern "C" __global__ void __launch_bounds__(kThreads) name(const __grid_constant__ BlurBatch batch) { \
    blur<out>(batch);                                                                                    \
  }
ENTRY(blur_float32, float)
ENTRY(blur_float16, __half)
ENTRY(blur_bfloat16, __nv_bfloat16)
ENTRY(blur_uint8, unsigned char)
