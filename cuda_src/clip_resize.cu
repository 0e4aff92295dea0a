// Decoded planes to finished clips where sampling runs along the axes: crop, antialiased resize, chroma upsampling, rotation by
// quarter turns, flip, YUV to RGB, changes of colour, normalisation, dtype and layout, for several clips in one launch. Where a
// change of colour needs each frame's mean, it ends with what comes before that and the sums for the mean; clip_color.cu does the
// rest. The truth it must equal is gpupipe/data/transform/reference.py and adjust.py.
//
// A block works out the weights of some output rows of a strip of output columns; then each of its warps makes these for frames of
// its own, without waiting for the others. A lane reads eight neighbouring samples of a row as one word and goes down the rows, so
// that a frame is read in whole sectors. Where the picture shrinks a sample of luma belongs to two output rows at most: it is read
// once and added to both. When a few output rows are summed, the warp sums across, out of shared memory, and finishes the pixels.
// "Rows" and "columns" are those of the stored frame; turning and mirroring it is a matter of the output's strides.
#include "color.cuh"
#include "sampling.cuh"
#include "store.cuh"

#ifndef CLIP_WARPS
#define CLIP_WARPS 8
#endif
#ifndef CLIP_ROWS
#define CLIP_ROWS 2
#endif
#if __CUDA_ARCH__ >= 1000  // the compiler needs more registers there
constexpr int kDefaultBlocks = 2, kDefaultLoads = 8;
#else
constexpr int kDefaultBlocks = 3, kDefaultLoads = 6;
#endif
#ifndef CLIP_LOADS
#define CLIP_LOADS kDefaultLoads
#endif
#ifndef CLIP_BLOCKS
#define CLIP_BLOCKS kDefaultBlocks
#endif
constexpr int kWarps = CLIP_WARPS;
constexpr int kThreads = 32 * kWarps;
constexpr int kBlocks = CLIP_BLOCKS;  // at a time on one multiprocessor, as far as registers go
constexpr int kRows = CLIP_ROWS;      // output rows that a warp sums across together
constexpr int kWide = 8;              // samples that a lane reads at once
constexpr int kSpan = 32 * kWide;     // samples of a row that a warp reads at once
template <typename Word>              // rows that a lane reads before it uses the first
constexpr int kLoads = CLIP_LOADS / static_cast<int>(sizeof(Word));
constexpr int kMaxClips = 8;
constexpr int kMaxFrames = 552;

enum Target { kFinished, kUnit, kFloat };

struct ClipJob {
  unsigned long long planes;  // address of the first frame
  unsigned long long out;     // of the pixel made of the first rows and columns
  unsigned long long sums;    // (frames, bands * strips) float32: of the greys
  long long frame_samples;    // from one frame to the next
  int stride_time, stride_channel, stride_row, stride_column;  // of out, in elements, along the stored axes
  Axis rows, columns;       // not mirrored
  float matrix[12];         // (3, 4): sample codes to RGB in [0, 1]
  float gain[3], bias[3];   // value = RGB * gain + bias
  ColorSteps steps;         // before that
  int pitch;                // samples from one row to the next
  int u_row, v_row;         // of chroma row 0, in rows of the frame
  int interleaved;          // U and V alternate in the rows from u_row on
  int clamp;                // RGB is held within [0, 1]
  int target;               // finished values; or RGB to go on with, in 16 bits of [0, 1] or as floats, and the sums
  int first_frame, frames;  // among source
  int frames_a_block;       // one after the other, or one a warp
  int bands, strips;        // what a frame's outputs are cut into
  int band, strip;          // output rows of a band, output columns of a strip
  int walks;                // a row of luma weighs in two output rows at most, which follow one another
  int row_weights;          // room for the luma weights of a band, an even number
  int row_chroma_taps, column_chroma_taps;  // room for an output's
};

struct Batch {
  ClipJob clips[kMaxClips];
  int first_block[kMaxClips + 1];  // of each clip
  short source[kMaxFrames];        // frame in planes
};
static_assert(sizeof(ClipJob) == 368, "gpupipe/data/transform/resize.py packs this struct");
static_assert(sizeof(Batch) <= 4096, "as large as an argument may be");

// Eight samples of one row. A sample is below 2^16, so as the low bits of 2^23's float it is exact, and taking 2^23 off leaves it:
// cheaper than a conversion on GPUs that convert slowly.
__device__ __forceinline__ float sample_of(unsigned int word, unsigned int selector) {
  return __uint_as_float(__byte_perm(word, 0x4B000000u, selector)) - 8388608.f;
}

struct Eight8 {
  uint2 words;
  __device__ __forceinline__ void load(const unsigned char* at) { words = *reinterpret_cast<const uint2*>(at); }
  __device__ __forceinline__ float sample(int k) const { return sample_of(k < 4 ? words.x : words.y, 0x7440u + (k & 3)); }
};

struct Eight16 {
  uint4 words;
  __device__ __forceinline__ void load(const unsigned short* at) { words = *reinterpret_cast<const uint4*>(at); }
  __device__ __forceinline__ float sample(int k) const {
    const unsigned int word = k < 2 ? words.x : k < 4 ? words.y : k < 6 ? words.z : words.w;
    return sample_of(word, k % 2 ? 0x7432u : 0x7410u);
  }
};

__device__ __forceinline__ Eight8 eight_of(const unsigned char*) { return {}; }
__device__ __forceinline__ Eight16 eight_of(const unsigned short*) { return {}; }

// Adds `count` rows of eight neighbouring samples to the sums of this output row, and of the next where rows weigh in both.
// Their weights are pairs then.
template <bool kWalks, typename Word>
__device__ __forceinline__ void sum_down(const Word* at, int pitch, const float* weights, int count, float (&sum)[kWide],
                                         float (&next)[kWide]) {
  constexpr int kLoads = ::kLoads<Word>;
#pragma unroll 1
  for (int first = 0; first < count; first += kLoads) {
    decltype(eight_of(at)) eights[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      if (first + k < count) eights[k].load(at);
      at += pitch;
    }
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      if (first + k >= count) break;
      float2 weight = make_float2(0.f, 0.f);
      if (kWalks)
        weight = reinterpret_cast<const float2*>(weights)[first + k];
      else
        weight.x = weights[first + k];
#pragma unroll
      for (int i = 0; i < kWide; ++i) {
        const float sample = eights[k].sample(i);
        sum[i] += weight.x * sample;
        if (kWalks) next[i] += weight.y * sample;
      }
    }
  }
}

// What an output row adds to the sums that the row before has begun: `count` rows from `first` on.
struct Step {
  int first, count, weights;
  int chroma_first, chroma_count;
};

// What a block keeps in shared memory, one behind the other; sizes are those of ClipJob.
struct Tables {
  float* sums;             // (warps, kRows, 2 kSpan): luma, then U V U V ...
  Taps *rows, *columns;    // (band), (strip)
  float* row_luma;         // (row_weights): of an output row, or pairs: of an output row and the next
  float* row_chroma;       // (band, row_chroma_taps)
  float* column_chroma;    // (column_chroma_taps, strip)
  Step* steps;             // (band)
};

__device__ __forceinline__ Tables tables_of(const ClipJob& clip) {
  extern __shared__ double shared_memory[];
  Tables t;
  t.sums = reinterpret_cast<float*>(shared_memory);
  t.rows = reinterpret_cast<Taps*>(t.sums + kWarps * kRows * 2 * kSpan);
  t.columns = t.rows + clip.band;
  t.row_luma = reinterpret_cast<float*>(t.columns + clip.strip);
  t.row_chroma = t.row_luma + clip.row_weights;
  t.column_chroma = t.row_chroma + clip.band * clip.row_chroma_taps;
  t.steps = reinterpret_cast<Step*>(t.column_chroma + clip.strip * clip.column_chroma_taps);
  return t;
}

__device__ __forceinline__ Step step_of(const ClipJob& clip, const Taps* rows, int row) {
  const Taps& taps = rows[row];
  Step step{taps.first, taps.count, row * clip.rows.max_taps, taps.chroma_first, taps.chroma_count};
  if (clip.walks) {
    if (row > 0) step.first = max(taps.first, rows[row - 1].first + rows[row - 1].count);
    step.count = max(taps.first + taps.count - step.first, 0);
    step.weights = 2 * (step.first - rows[0].first);
  }
  return step;
}

__device__ __forceinline__ void fill_tables(const ClipJob& clip, const Tables& t, int first_row, int rows, int first_column,
                                            int columns) {
  const int thread = threadIdx.x;
  for (int k = thread; k < rows + columns; k += kThreads) {
    if (k < rows)
      t.rows[k] = find_taps(clip.rows, first_row + k);
    else
      t.columns[k - rows] = find_taps(clip.columns, first_column + k - rows);
  }
  __syncthreads();
  for (int k = thread; k < rows; k += kThreads) t.steps[k] = step_of(clip, t.rows, k);
  for (int k = thread; k < rows * clip.rows.max_taps; k += kThreads) {
    const int row = k / clip.rows.max_taps;
    const Step step = step_of(clip, t.rows, row);
    const Taps& taps = t.rows[row];
    const int tap = k % clip.rows.max_taps, sample = taps.first + tap;
    if (tap >= taps.count || sample < step.first) continue;
    if (!clip.walks) {
      t.row_luma[step.weights + tap] = luma_weight(taps, tap);
      continue;
    }
    float* weights = t.row_luma + step.weights + 2 * (sample - step.first);
    weights[0] = luma_weight(taps, tap);
    weights[1] = row + 1 < rows ? luma_weight(t.rows[row + 1], sample - t.rows[row + 1].first) : 0.f;
  }
  for (int k = thread; k < rows * clip.row_chroma_taps; k += kThreads)
    t.row_chroma[k] = chroma_weight(clip.rows, t.rows[k / clip.row_chroma_taps], k % clip.row_chroma_taps);
  for (int k = thread; k < columns * clip.column_chroma_taps; k += kThreads)
    t.column_chroma[k / columns * clip.strip + k % columns] =
        chroma_weight(clip.columns, t.columns[k % columns], k / columns);
  __syncthreads();
}

// Where a lane reads, and where it leaves what it has summed.
template <typename Word>
struct Lane {
  const Word *luma, *chroma;  // of row 0 of the frame
  float *luma_sums, *chroma_sums;
  bool has_luma, has_chroma;
};

template <typename Word>
__device__ __forceinline__ void sum_row(const ClipJob& clip, const Tables& t, const Lane<Word>& lane, int row, int slot,
                                        float (&next)[kWide]) {
  const Step step = t.steps[row];
  float sum[kWide];
  if (lane.has_luma) {
    const Word* at = lane.luma + step.first * clip.pitch;
    const float* weights = t.row_luma + step.weights;
#pragma unroll
    for (int i = 0; i < kWide; ++i) {
      sum[i] = next[i];
      next[i] = 0.f;
    }
    if (clip.walks)
      sum_down<true>(at, clip.pitch, weights, step.count, sum, next);
    else
      sum_down<false>(at, clip.pitch, weights, step.count, sum, next);
    float4* to = reinterpret_cast<float4*>(lane.luma_sums + slot * 2 * kSpan);
    to[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    to[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
  }
  if (lane.has_chroma) {
    const Word* at = lane.chroma + step.chroma_first * clip.pitch;
#pragma unroll
    for (int i = 0; i < kWide; ++i) sum[i] = 0.f;
    sum_down<false>(at, clip.pitch, t.row_chroma + row * clip.row_chroma_taps, step.chroma_count, sum, next);
    float* to = lane.chroma_sums + slot * 2 * kSpan;
    if (clip.interleaved) {
      reinterpret_cast<float4*>(to)[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
      reinterpret_cast<float4*>(to)[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
    } else {
#pragma unroll
      for (int i = 0; i < kWide; ++i) to[2 * i] = sum[i];
    }
  }
}

template <typename Out>
__device__ __forceinline__ void put(Out* at, int stride_channel, const Rgb& c, const ClipJob& clip) {
  store(at, c.r * clip.gain[0] + clip.bias[0]);
  store(at + stride_channel, c.g * clip.gain[1] + clip.bias[1]);
  store(at + 2 * stride_channel, c.b * clip.gain[2] + clip.bias[2]);
}

// A strip's outputs of some rows, out of the sums down; gives the sum of the greys of those that this lane makes.
template <typename Out>
__device__ __forceinline__ float finish_rows(const ClipJob& clip, const Tables& t, const float* luma, const float* chroma, int lane,
                                             int columns, int at, int rows) {
  float greys = 0.f;
#pragma unroll 1
  for (int column = lane; column < columns; column += 32) {
    const Taps taps = t.columns[column];
    float y[kRows] = {}, u[kRows] = {}, v[kRows] = {};
    const float* luma_sums = luma + taps.first;
    const float start = (0.5f - taps.centre) * taps.inverse;
    float number = 0.f;
#pragma unroll 2
    for (int tap = 0; tap < taps.count; ++tap) {
      const float weight = 1.f - fabsf(number * taps.inverse + start);
      number += 1.f;
#pragma unroll
      for (int row = 0; row < kRows; ++row) y[row] += weight * luma_sums[row * 2 * kSpan + tap];
    }
    const float* chroma_sums = chroma + 2 * taps.chroma_first;
#pragma unroll 2
    for (int tap = 0; tap < taps.chroma_count; ++tap) {
      const float weight = t.column_chroma[tap * clip.strip + column];
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const float2 uv = *reinterpret_cast<const float2*>(chroma_sums + row * 2 * kSpan + 2 * tap);
        u[row] += weight * uv.x;
        v[row] += weight * uv.y;
      }
    }
    Rgb pixels[kRows];
    const float* m = clip.matrix;
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const float luma_value = y[row] * taps.norm;
      pixels[row] = {m[0] * luma_value + m[1] * u[row] + m[2] * v[row] + m[3],
                     m[4] * luma_value + m[5] * u[row] + m[6] * v[row] + m[7],
                     m[8] * luma_value + m[9] * u[row] + m[10] * v[row] + m[11]};
      if (clip.clamp) pixels[row] = {__saturatef(pixels[row].r), __saturatef(pixels[row].g), __saturatef(pixels[row].b)};
    }
    change(clip.steps, pixels, 0.f);
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      if (row >= rows) break;
      const int place = at + row * clip.stride_row + column * clip.stride_column;
      if (clip.target == kFinished) {
        put(reinterpret_cast<Out*>(clip.out) + place, clip.stride_channel, pixels[row], clip);
        continue;
      }
      greys += grey_of(pixels[row]);
      if (clip.target == kUnit)
        put(reinterpret_cast<unsigned short*>(clip.out) + place, clip.stride_channel, pixels[row], clip);
      else
        put(reinterpret_cast<float*>(clip.out) + place, clip.stride_channel, pixels[row], clip);
    }
  }
  return greys;
}

template <typename Word, typename Out>
__device__ __forceinline__ void make_clips(const Batch& batch) {
  int number = 0;
  while (static_cast<int>(blockIdx.x) >= batch.first_block[number + 1]) ++number;
  const ClipJob& clip = batch.clips[number];
  const int block = blockIdx.x - batch.first_block[number];
  const int strip = block % clip.strips, band = block / clip.strips % clip.bands;
  const int first_frame = block / clip.strips / clip.bands * clip.frames_a_block;
  const int first_row = band * clip.band, first_column = strip * clip.strip;
  const int rows = min(clip.band, clip.rows.outputs - first_row);
  const int columns = min(clip.strip, clip.columns.outputs - first_column);
  const Tables t = tables_of(clip);
  fill_tables(clip, t, first_row, rows, first_column, columns);

  // Eight samples are read together, so what is read begins at a multiple of eight.
  const Taps &left = t.columns[0], &right = t.columns[columns - 1];
  const int luma_begin = left.first & ~(kWide - 1), chroma_begin = left.chroma_first & ~(kWide - 1);
  const int luma_count = right.first + right.count - luma_begin;
  const int chroma_count = right.chroma_first + right.chroma_count - chroma_begin;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float* luma = t.sums + warp * kRows * 2 * kSpan;
  float* chroma = luma + kSpan;
  Lane<Word> at;
  at.luma_sums = luma + kWide * lane;
  at.has_luma = kWide * lane < luma_count;
  int chroma_place;
  if (clip.interleaved) {
    chroma_place = clip.u_row * clip.pitch + 2 * chroma_begin + kWide * lane;
    at.chroma_sums = chroma + kWide * lane;
    at.has_chroma = kWide * lane < 2 * chroma_count;
  } else {  // half of the warp reads U, the other half V
    const int half = lane % 16;
    chroma_place = (lane < 16 ? clip.u_row : clip.v_row) * clip.pitch + chroma_begin + kWide * half;
    at.chroma_sums = chroma + 2 * kWide * half + lane / 16;
    at.has_chroma = kWide * half < chroma_count;
  }
  const int end = min(first_frame + clip.frames_a_block, clip.frames);
  for (int frame = first_frame + warp; frame < end; frame += kWarps) {
    const Word* plane = reinterpret_cast<const Word*>(clip.planes) + batch.source[clip.first_frame + frame] * clip.frame_samples;
    at.luma = plane + luma_begin + kWide * lane;
    at.chroma = plane + chroma_place;
    float next[kWide] = {}, greys = 0.f;
#pragma unroll 1
    for (int row = 0; row < rows; row += kRows) {
      const int some = min(kRows, rows - row);
#pragma unroll 1
      for (int slot = 0; slot < some; ++slot) sum_row(clip, t, at, row + slot, slot, next);
      __syncwarp();
      const int place =
          frame * clip.stride_time + (first_row + row) * clip.stride_row + first_column * clip.stride_column;
      greys += finish_rows<Out>(clip, t, luma - luma_begin, chroma - 2 * chroma_begin, lane, columns, place, some);
      __syncwarp();
    }
    if (clip.target == kFinished) continue;
    luma[lane] = greys;
    __syncwarp();
    if (lane == 0) {
      for (int k = 1; k < 32; ++k) greys += luma[k];
      reinterpret_cast<float*>(clip.sums)[(frame * clip.bands + band) * clip.strips + strip] = greys;
    }
    __syncwarp();
  }
}

#define ENTRY(name, word, out)                                                                                \
  extern "C" __global__ void __launch_bounds__(kThreads, kBlocks) name(const __grid_constant__ Batch batch) { \
    make_clips<word, out>(batch);                                                                             \
  }
#ifdef CLIP_ENTRY  // at run time only the entry that is wanted is compiled: all of them take seconds
ENTRY(CLIP_ENTRY, CLIP_WORD, CLIP_OUT)
#else
ENTRY(resize_u8_float32, unsigned char, float)
ENTRY(resize_u8_float16, unsigned char, __half)
ENTRY(resize_u8_bfloat16, unsigned char, __nv_bfloat16)
ENTRY(resize_u8_uint8, unsigned char, unsigned char)
ENTRY(resize_u16_float32, unsigned short, float)
ENTRY(resize_u16_float16, unsigned short, __half)
ENTRY(resize_u16_bfloat16, unsigned short, __nv_bfloat16)
ENTRY(resize_u16_uint8, unsigned short, unsigned char)
#endif
