// Decoded planes to finished clips through any affine map: turns, shears, shifts and zooms; nearest and bicubic interpolation; and
// those resizes along the axes that clip_resize.cu has no room for. Chroma upsampling, rotation, flip, fill, YUV to RGB, changes of
// colour, normalisation, dtype and layout come with it, for several clips in one launch. Where a change of colour needs each
// frame's mean, or a blur follows, it ends with RGB and the sums for the mean, as clip_resize.cu does. The truth it must equal is
// gpupipe/data/transform/affine.py and geometry.py.
//
// Planes are read through a texture where samples are few (turns, shifts, zooms, temporal picks and blends without a wide filter),
// and by plain loads where antialias makes them many. Two frames are blended for a time between them as sums of their samples.
//
// A thread sums one output pixel's samples straight from the planes, in some frames together, for which places and weights are the
// same. With antialias a pixel's samples grow with the shrink, but so does the frame for the same output: each of its samples is
// read by about four outputs (sixteen with bicubic), out of the cache. RGB of the frame at its own size, to be moved in a second
// step, would be twelve bytes to write and as many reads, so there is no second step for any shrink.
//
// Samples are read four neighbours of a row at a time, down the rows of such a strip: a row's weight is worked out once for a few
// strips and kept in shared memory, where each thread has a column of its own, and a column's weight once for its strip.
#include "color.cuh"
#include "store.cuh"

constexpr int kTile = 16;  // outputs of a block along each axis
constexpr int kThreads = kTile * kTile;
#ifndef CLIP_TOGETHER
#define CLIP_TOGETHER 4
#endif
#ifndef CLIP_BLOCKS
#define CLIP_BLOCKS 2
#endif
constexpr int kTogether = CLIP_TOGETHER;  // frames that a thread makes together
constexpr int kBlocks = CLIP_BLOCKS;      // at a time on one multiprocessor, as far as registers go
constexpr int kTable = 16;    // weights of rows that a thread keeps
constexpr int kWide = 4;      // samples that are read at once
constexpr int kMaxClips = 8;
constexpr int kMaxFrames = 256;
constexpr int kMaxBlends = 128;

enum Target { kFinished, kUnit, kFloat };
enum Filter { kNearest, kBilinear, kBicubic };
enum Edges {
  kDrop,         // what lies outside weighs nothing, and the fill gets its share
  kRenormalise,  // what lies outside weighs nothing, and the others get its share
  kRepeat,       // the outermost samples are repeated
};

// Sampling along one stored axis, in luma samples; sample k covers k to k + 1.
struct Side {
  double across, down, offset;  // output pixel (x, y) lies at across * (x + 1/2) + down * (y + 1/2) + offset
  double support;               // samples that the filter's unit spans
  float chroma_step;            // chroma samples a luma sample: 1, 1/2 or 1/4
  float chroma_offset;          // luma position of chroma sample 0
  int low, high;                // luma samples that may be read: low ... high - 1
  int chroma_size;
  int against;  // the axis runs against that of the display: of two samples, nearest takes the lower for a place between them
};

struct MoveJob {
  unsigned long long planes;  // address of the first frame; with textures the texture of all of them, kWide samples a texel
  unsigned long long out;     // of output pixel (0, 0)
  unsigned long long sums;    // (frames, tiles) float32: of the greys
  long long frame_samples;    // from one frame to the next
  long long stride_time, stride_channel, stride_row, stride_column;  // of out, in elements
  Side rows, columns;                                                // of the stored frame
  float matrix[12];                                                  // (3, 4): sample codes to RGB in [0, 1]
  float gain[3], bias[3];                                            // value = RGB * gain + bias
  float fill[3];                                                     // stands in for RGB outside of the frame
  ColorSteps steps;                                                  // before gain and bias
  float sharpness;                                                   // a of Keys's cubic
  int filter, edges;
  int pitch;         // samples from one row to the next
  int u_row, v_row;  // of chroma row 0, in rows of the frame
  int interleaved;   // U and V alternate in the rows from u_row on
  int clamp;         // RGB is held within [0, 1]
  int target;        // finished values; or RGB to go on with, in 16 bits of [0, 1] or as floats, and the sums
  int first_frame, frames;  // among source
  int first_blend;          // among blend; -1: nothing is blended
  int frame_rows;           // from one frame to the next
  int height, width;        // of the output
  int tiles_across, tiles;  // of a frame
};

struct MoveBatch {
  MoveJob clips[kMaxClips];
  int first_block[kMaxClips + 1];  // of each clip
  short source[kMaxFrames];        // frame in planes; of a clip that is blended two for each of its frames
  float blend[kMaxBlends];         // share of the second one
};
static_assert(sizeof(MoveJob) == 376, "gpupipe/data/transform/move.py packs this struct");
static_assert(sizeof(MoveBatch) <= 4096, "as large as an argument may be");

extern __shared__ double shared_memory[];

// What one output reads along one axis.
struct Taps {
  int origin, count;  // of the filter, samples outside included
  int first, end;     // luma samples that are read
  int chroma_first, chroma_end;
  float start;    // of sample `origin`, its distance from the output's place in units of the filter
  float inverse;  // a sample in such units
  float norm;     // 1 / sum of the weights
  float cover;    // share of the weights that lay inside
  int unused;     // makes an odd number of words, so that those of a warp's threads lie in different banks
};

__device__ __forceinline__ int clamp_int(int value, int low, int high) { return min(max(value, low), high); }

__device__ __forceinline__ float shape(const MoveJob& job, float x) {
  x = fabsf(x);
  if (job.filter == kBilinear) return fmaxf(0.f, 1.f - x);
  if (job.filter == kNearest) return 1.f;
  const float a = job.sharpness;
  const float near = ((a + 2.f) * x - (a + 3.f)) * x * x + 1.f, far = a * (((x - 5.f) * x + 8.f) * x - 4.f);
  return x < 1.f ? near : x < 2.f ? far : 0.f;
}

__device__ __forceinline__ float filter_at(const MoveJob& job, const Taps& taps, int sample) {
  return shape(job, static_cast<float>(sample - taps.origin) * taps.inverse + taps.start);
}

// Places are worked out in double: at column 8000 a float knows one only to 1/2000 of a sample. No step is fused with the next, so
// that a place on the line between two samples is there for the reference too.
__device__ __forceinline__ Taps find_taps(const MoveJob& job, const Side& side, int x, int y) {
  constexpr double kFar = 1 << 29;  // far outside of any frame, and an int
  double place = __dadd_rn(__dadd_rn(__dmul_rn(side.across, x + 0.5), __dmul_rn(side.down, y + 0.5)), side.offset);
  place = fmin(fmax(place, -kFar), kFar);
  Taps taps;
  int last;
  if (job.filter == kNearest) {
    taps.origin = static_cast<int>(side.against ? ceil(place) - 1. : floor(place));
    last = taps.origin + 1;
  } else {
    const double reach = job.filter == kBicubic ? 2. * side.support : side.support;
    taps.origin = static_cast<int>(floor(place - reach + 0.5));
    last = static_cast<int>(floor(place + reach + 0.5));
  }
  taps.count = last - taps.origin;
  taps.start = static_cast<float>((taps.origin + 0.5 - place) / side.support);
  taps.inverse = static_cast<float>(1. / side.support);
  float all = 0.f, inside = 0.f;
  for (int sample = taps.origin; sample < last; ++sample) {
    const float weight = filter_at(job, taps, sample);
    all += weight;
    if (sample >= side.low && sample < side.high) inside += weight;
  }
  taps.norm = 1.f / (job.edges == kRenormalise ? inside : all);
  taps.cover = 1.f;
  if (job.edges == kRepeat) {
    taps.first = clamp_int(taps.origin, side.low, side.high - 1);
    taps.end = clamp_int(last - 1, side.low, side.high - 1) + 1;
  } else {
    taps.first = clamp_int(taps.origin, side.low, side.high);
    taps.end = max(taps.first, min(last, side.high));
    if (job.edges == kDrop && (taps.origin < side.low || last > side.high)) taps.cover = inside * taps.norm;
  }
  if (taps.first >= taps.end) taps.first = taps.end = 0;  // nothing is read, not even beside it
  taps.chroma_first = taps.first;
  taps.chroma_end = taps.end;
  if (side.chroma_step < 1.f && taps.first < taps.end) {
    const int top = side.chroma_size - 1;
    taps.chroma_first = clamp_int(static_cast<int>(floorf((taps.first - side.chroma_offset) * side.chroma_step)), 0, top);
    taps.chroma_end =
        clamp_int(static_cast<int>(floorf((taps.end - 1 - side.chroma_offset) * side.chroma_step)) + 1, 0, top) + 1;
  }
  return taps;
}

__device__ __forceinline__ float luma_weight(const MoveJob& job, const Side& side, const Taps& taps, int sample) {
  if (sample < taps.first || sample >= taps.end) return 0.f;
  if (job.edges != kRepeat || (sample > side.low && sample < side.high - 1)) return filter_at(job, taps, sample) * taps.norm;
  float sum = 0.f;
  for (int from = taps.origin; from < taps.origin + taps.count; ++from)
    if (clamp_int(from, side.low, side.high - 1) == sample) sum += filter_at(job, taps, from);
  return sum * taps.norm;
}

// Luma position x reads chroma at p = (x - offset) * step, held within the plane, from its two neighbours. So chroma sample k is
// read by the positions with |p - k| < 1, of which there are less than 2 / step; at the plane's edges those beyond it too, and
// these are no farther away.
__device__ __forceinline__ float weight_of(const MoveJob& job, const Side& side, const Taps& taps, int k, bool is_chroma) {
  if (is_chroma && (k < taps.chroma_first || k >= taps.chroma_end)) return 0.f;
  const bool direct = !is_chroma || side.chroma_step == 1.f;
  const int factor = static_cast<int>(1.f / side.chroma_step);
  const int begin = factor * (k - 1) + static_cast<int>(floorf(side.chroma_offset)) + 1;
  const float top = static_cast<float>(side.chroma_size - 1);
  float sum = 0.f;
#pragma unroll 1
  for (int x = direct ? k : begin; x < (direct ? k + 1 : begin + 2 * factor); ++x) {
    const float place = fminf(fmaxf((x - side.chroma_offset) * side.chroma_step, 0.f), top);
    sum += luma_weight(job, side, taps, x) * (direct ? 1.f : fmaxf(0.f, 1.f - fabsf(place - k)));
  }
  return sum;
}

// A sample is below 2^16, so as the low bits of 2^23's float it is exact, and taking 2^23 off leaves it: cheaper than a conversion
// on GPUs that convert slowly.
__device__ __forceinline__ float sample_of(unsigned int word, unsigned int selector) {
  return __uint_as_float(__byte_perm(word, 0x4B000000u, selector)) - 8388608.f;
}

struct Four8 {
  unsigned int word;
  __device__ __forceinline__ void load(const unsigned char* at) { word = *reinterpret_cast<const unsigned int*>(at); }
  __device__ __forceinline__ void fetch(cudaTextureObject_t from, float x, float y) { word = tex2D<unsigned int>(from, x, y); }
  __device__ __forceinline__ float sample(int k) const { return sample_of(word, 0x7440u + k); }
};

struct Four16 {
  uint2 words;
  __device__ __forceinline__ void load(const unsigned short* at) { words = *reinterpret_cast<const uint2*>(at); }
  __device__ __forceinline__ void fetch(cudaTextureObject_t from, float x, float y) { words = tex2D<uint2>(from, x, y); }
  __device__ __forceinline__ float sample(int k) const {
    return sample_of(k < 2 ? words.x : words.y, k % 2 ? 0x7432u : 0x7410u);
  }
};

__device__ __forceinline__ Four8 four_of(unsigned char) { return {}; }
__device__ __forceinline__ Four16 four_of(unsigned short) { return {}; }

// What a thread makes: one output pixel of kCount frames.
template <typename Frame, int kCount>
struct Pixel {
  const Taps &rows, &columns;  // in shared memory: between two sums nothing of them is needed
  float* table;                // (kTable + kWide), kThreads apart: weights of some rows, and of a strip's columns
  Frame frames[kCount];
};

// A frame is an address for plain loads, or the middle of its first row in a texture, whose cache keeps to neighbourhoods in both
// directions.
template <typename Word>
__device__ __forceinline__ void find_frame(const MoveJob& job, int number, const Word*& frame) {
  frame = reinterpret_cast<const Word*>(job.planes) + number * job.frame_samples;
}

__device__ __forceinline__ void find_frame(const MoveJob& job, int number, float& frame) {
  frame = static_cast<float>(number * job.frame_rows) + 0.5f;
}

template <typename Four, typename Word>
__device__ __forceinline__ void read(Four& four, const MoveJob& job, const Word* frame, int row, int column) {
  four.load(frame + row * job.pitch + column);
}

template <typename Four>
__device__ __forceinline__ void read(Four& four, const MoveJob& job, float frame, int row, int column) {
  four.fetch(job.planes, static_cast<float>(column / kWide) + 0.5f, frame + static_cast<float>(row));
}

// A part of the frame's rows: luma, one chroma plane, or both where U and V alternate.
struct Plane {
  int first_row;  // among the frame's
  bool is_chroma, alternates;
};

// The sums of `count` of a plane's rows from `row` on, kTable at most, those of samples in even and in odd columns apart, for each
// frame. A strip's ends may lie outside of what is read, and even of the row, but within its pitch: they weigh nothing. Luma and
// chroma take one loop, not one each, as a kernel is compiled while somebody waits.
template <typename Word, typename Frame, int kCount>
__device__ __forceinline__ void sum_rows(const MoveJob& job, const Pixel<Frame, kCount>& pixel, const Plane& plane, int row, int count,
                                         float (&even)[kCount], float (&odd)[kCount]) {
  const Taps& columns = pixel.columns;
  const int step = plane.alternates ? 2 : 1;  // samples of a row for one of a plane
  const int begin = (step * (plane.is_chroma ? columns.chroma_first : columns.first)) & ~(kWide - 1);
  const int end = step * (plane.is_chroma ? columns.chroma_end : columns.end);
  float* column_table = pixel.table + kTable * kThreads;
#pragma unroll
  for (int frame = 0; frame < kCount; ++frame) even[frame] = odd[frame] = 0.f;
#pragma unroll 1
  for (int k = 0; k < count; ++k)
    pixel.table[k * kThreads] = weight_of(job, job.rows, pixel.rows, row + k, plane.is_chroma);
#pragma unroll 1
  for (int strip = begin; strip < end; strip += kWide) {
#pragma unroll 1
    for (int i = 0; i < kWide; i += step) {
      const float weight = weight_of(job, job.columns, columns, (strip + i) / step, plane.is_chroma);
      column_table[i * kThreads] = weight;
      if (plane.alternates) column_table[(i + 1) * kThreads] = weight;
    }
    float sums[kCount][kWide] = {};
#pragma unroll 2
    for (int k = 0; k < count; ++k) {
      const float weight = pixel.table[k * kThreads];
#pragma unroll
      for (int frame = 0; frame < kCount; ++frame) {
        auto four = four_of(Word());
        read(four, job, pixel.frames[frame], plane.first_row + row + k, strip);
#pragma unroll
        for (int i = 0; i < kWide; ++i) sums[frame][i] += weight * four.sample(i);
      }
    }
#pragma unroll
    for (int i = 0; i < kWide; i += 2) {
      const float weight = column_table[i * kThreads], next = column_table[(i + 1) * kThreads];
#pragma unroll
      for (int frame = 0; frame < kCount; ++frame) {
        even[frame] += weight * sums[frame][i];
        odd[frame] += next * sums[frame][i + 1];
      }
    }
  }
}

template <typename Out>
__device__ __forceinline__ void put(Out* at, const Rgb& c, const MoveJob& job) {
  store(at, c.r * job.gain[0] + job.bias[0]);
  store(at + job.stride_channel, c.g * job.gain[1] + job.bias[1]);
  store(at + 2 * job.stride_channel, c.b * job.gain[2] + job.bias[2]);
}

// One tile of output pixels for the clip's frames first_frame ... first_frame + count - 1; each of two sources when blended.
template <typename Word, typename Frame, typename Out, int kCount, bool kBlended>
__device__ __forceinline__ void make_tile(const MoveJob& job, const short* source, const float* blend, int tile, int first_frame,
                                          int count) {
  constexpr int kSources = kBlended ? 2 * kCount : kCount;
  const int thread = threadIdx.x;
  // A warp makes 8 x 4 pixels, which lie close together in the frame however it is turned.
  const int x = tile % job.tiles_across * kTile + thread / 32 % 2 * 8 + thread % 8;
  const int y = tile / job.tiles_across * kTile + thread / 64 * 4 + thread % 32 / 8;
  const bool inside = x < job.width && y < job.height;
  float* table = reinterpret_cast<float*>(shared_memory);
  Taps* taps = reinterpret_cast<Taps*>(table + (kTable + kWide) * kThreads);
  Taps &rows = taps[thread], &columns = taps[kThreads + thread];
  rows = find_taps(job, job.rows, min(x, job.width - 1), min(y, job.height - 1));
  columns = find_taps(job, job.columns, min(x, job.width - 1), min(y, job.height - 1));
  Pixel<Frame, kSources> pixel{rows, columns, table + thread, {}};
#pragma unroll
  for (int k = 0; k < kSources; ++k) {
    const int frame = first_frame + min(kBlended ? k / 2 : k, count - 1);
    find_frame(job, source[kBlended ? frame + k % 2 * job.frames : frame], pixel.frames[k]);
  }

  float luma[kSources] = {}, u[kSources] = {}, v[kSources] = {};
#pragma unroll 1
  for (int part = 0; part < (job.interleaved ? 2 : 3); ++part) {
    const bool both = job.interleaved && part == 1;
    const Plane plane{part == 0 ? 0 : part == 1 ? job.u_row : job.v_row, part > 0, both};
    const int end = plane.is_chroma ? rows.chroma_end : rows.end;
#pragma unroll 1
    for (int row = plane.is_chroma ? rows.chroma_first : rows.first; row < end; row += kTable) {
      float even[kSources], odd[kSources];
      sum_rows<Word>(job, pixel, plane, row, min(kTable, end - row), even, odd);
#pragma unroll
      for (int k = 0; k < kSources; ++k) {
        const float sum = even[k] + odd[k];
        if (part == 0) luma[k] += sum;
        if (part == 1) u[k] += both ? even[k] : sum;
        if (part == 2 || both) v[k] += both ? odd[k] : sum;
      }
    }
  }

  if (kBlended) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const float share = blend[first_frame + min(k, count - 1)];
      luma[k] = luma[2 * k] + share * (luma[2 * k + 1] - luma[2 * k]);
      u[k] = u[2 * k] + share * (u[2 * k + 1] - u[2 * k]);
      v[k] = v[2 * k] + share * (v[2 * k + 1] - v[2 * k]);
    }
  }
  const float cover = pixel.rows.cover * pixel.columns.cover;
  Rgb pixels[kCount];
  const float* m = job.matrix;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    pixels[k] = {m[0] * luma[k] + m[1] * u[k] + m[2] * v[k] + m[3] * cover + job.fill[0] * (1.f - cover),
                 m[4] * luma[k] + m[5] * u[k] + m[6] * v[k] + m[7] * cover + job.fill[1] * (1.f - cover),
                 m[8] * luma[k] + m[9] * u[k] + m[10] * v[k] + m[11] * cover + job.fill[2] * (1.f - cover)};
    if (job.clamp) pixels[k] = {__saturatef(pixels[k].r), __saturatef(pixels[k].g), __saturatef(pixels[k].b)};
  }
  change(job.steps, pixels, 0.f);
  const long long place = first_frame * job.stride_time + y * job.stride_row + x * job.stride_column;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    if (!inside || k >= count) break;
    const long long at = place + k * job.stride_time;
    if (job.target == kFinished)
      put(reinterpret_cast<Out*>(job.out) + at, pixels[k], job);
    else if (job.target == kUnit)
      put(reinterpret_cast<unsigned short*>(job.out) + at, pixels[k], job);
    else
      put(reinterpret_cast<float*>(job.out) + at, pixels[k], job);
  }
  if (job.target == kFinished) return;

  // The greys' sums, of one order whatever the GPU. A thread writes where its own weights were.
#pragma unroll
  for (int k = 0; k < kCount; ++k) pixel.table[k * kThreads] = inside ? grey_of(pixels[k]) : 0.f;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread >= half) continue;
#pragma unroll
    for (int k = 0; k < kCount; ++k) pixel.table[k * kThreads] += pixel.table[k * kThreads + half];
  }
  if (thread > 0) return;
  for (int k = 0; k < min(kCount, count); ++k)
    reinterpret_cast<float*>(job.sums)[static_cast<long long>(first_frame + k) * job.tiles + tile] = pixel.table[k * kThreads];
}

template <typename Word, typename Frame, typename Out>
__device__ __forceinline__ void move_clips(const MoveBatch& batch) {
  int number = 0;
  while (static_cast<int>(blockIdx.x) >= batch.first_block[number + 1]) ++number;
  const MoveJob& job = batch.clips[number];
  const int block = blockIdx.x - batch.first_block[number];
  const int tile = block % job.tiles, first_frame = block / job.tiles * kTogether;
  const int count = min(kTogether, job.frames - first_frame);
  const short* source = batch.source + job.first_frame;
  if (job.first_blend >= 0) {
    const float* blend = batch.blend + job.first_blend;
    for (int k = 0; k < count; k += kTogether / 2) {
      make_tile<Word, Frame, Out, kTogether / 2, true>(job, source, blend, tile, first_frame + k, min(kTogether / 2, count - k));
      __syncthreads();  // before the tables are used again
    }
  } else if (count == 1) {  // each frame of a clip with draws of its own
    make_tile<Word, Frame, Out, 1, false>(job, source, nullptr, tile, first_frame, 1);
  } else {
    make_tile<Word, Frame, Out, kTogether, false>(job, source, nullptr, tile, first_frame, count);
  }
}

#define ENTRY(name, word, frame, out)                                                                    \
  extern "C" __global__ void __launch_bounds__(kThreads, kBlocks) name(const __grid_constant__ MoveBatch batch) { \
    move_clips<word, frame, out>(batch);                                                                 \
  }
#ifdef CLIP_ENTRY  // at run time only the entry that is wanted is compiled: all of them take seconds
ENTRY(CLIP_ENTRY, CLIP_WORD, CLIP_FRAME, CLIP_OUT)
#else
ENTRY(move_u8_float32, unsigned char, const unsigned char*, float)
ENTRY(move_u8_float16, unsigned char, const unsigned char*, __half)
ENTRY(move_u8_bfloat16, unsigned char, const unsigned char*, __nv_bfloat16)
ENTRY(move_u8_uint8, unsigned char, const unsigned char*, unsigned char)
ENTRY(move_u16_float32, unsigned short, const unsigned short*, float)
ENTRY(move_u16_float16, unsigned short, const unsigned short*, __half)
ENTRY(move_u16_bfloat16, unsigned short, const unsigned short*, __nv_bfloat16)
ENTRY(move_u16_uint8, unsigned short, const unsigned short*, unsigned char)
ENTRY(move_u8_texture_float32, unsigned char, float, float)
ENTRY(move_u8_texture_float16, unsigned char, float, __half)
ENTRY(move_u8_texture_bfloat16, unsigned char, float, __nv_bfloat16)
ENTRY(move_u8_texture_uint8, unsigned char, float, unsigned char)
ENTRY(move_u16_texture_float32, unsigned short, float, float)
ENTRY(move_u16_texture_float16, unsigned short, float, __half)
ENTRY(move_u16_texture_bfloat16, unsigned short, float, __nv_bfloat16)
ENTRY(move_u16_texture_uint8, unsigned short, float, unsigned char)
#endif
