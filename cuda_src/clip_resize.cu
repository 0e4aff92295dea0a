// Decoded planes to finished clips where sampling runs along the axes: crop, antialiased resize, chroma upsampling, rotation by
// quarter turns, flip, YUV to RGB, changes of colour, normalisation, dtype and layout, for several clips in one launch. Where a
// change of colour needs each frame's mean, it ends with what comes before that and the sums for the mean; clip_color.cu does the
// rest. The truth it must equal is gpupipe/data/transform/reference.py and adjust.py.
//
// Both sums, across and down, are matrix products, of weights that are mostly zero, on the tensor cores: these have so much more to
// give than the rest that what counts is how little else there is to do. A warp makes a strip of 16 output columns and a band of up
// to 16 output rows of one frame. It reads samples from where they lie into the places where an operand has them, as halves: up to
// 10 bits are exact. Sums across come out where the product down wants its operand, and sums down have Y, U and V of a pixel in one
// lane. So nothing is exchanged between lanes, and warps of a block share no more than their tables of weights.
//
// Weights are two halves each, the second what the first leaves of it; sums across, and weights down, are two tf32 each. That is 21
// bits and more. Zeros cost time, so tables hold just the tiles of samples that a strip or a tile of eight output rows reaches.
// "Rows" and "columns" are those of the stored frame; turning and mirroring it is a matter of the output's strides.
#include "color.cuh"
#include "samples.cuh"
#include "sampling.cuh"
#include "store.cuh"

#ifndef CLIP_WARPS
#define CLIP_WARPS 8
#endif
#ifndef CLIP_BLOCKS
#define CLIP_BLOCKS (sizeof(Word) == 1 ? 3 : 2)
#endif
#ifndef CLIP_LUMA_TILES
#define CLIP_LUMA_TILES 4
#endif
#ifndef CLIP_CHROMA_TILES
#define CLIP_CHROMA_TILES 2
#endif
constexpr int kWarps = CLIP_WARPS;
constexpr int kThreads = 32 * kWarps;
template <typename Word>                         // at a time on one multiprocessor, as far as registers go
constexpr int kBlocks = CLIP_BLOCKS;
constexpr int kLumaTiles = CLIP_LUMA_TILES;      // of eight rows of samples, that a warp sums across together
constexpr int kChromaTiles = CLIP_CHROMA_TILES;
constexpr int kStrip = 16;                       // output columns
constexpr int kBandTiles = 2;                    // of eight output rows, at most
constexpr int kMaxClips = 8;
constexpr int kMaxFrames = 512;

static_assert(kBandTiles == 2, "that is how many make_clips finishes");

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
  int band;                 // output rows of a band
  int shift, fine;          // of 16-bit samples: see Bits
  int luma_groups, chroma_groups;           // of columns: room in the tables for a strip's
  int luma_chunks, chroma_chunks;           // of eight rows: for those of a tile of outputs
  int row_chroma_taps, column_chroma_taps;  // for those of an output
};

struct Batch {
  ClipJob clips[kMaxClips];
  int first_block[kMaxClips + 1];  // of each clip
  short source[kMaxFrames];        // frame in planes
};
static_assert(sizeof(ClipJob) == 376, "gpupipe/data/transform/resize.py packs this struct");
static_assert(sizeof(Batch) <= 4096, "as large as an argument may be");

// 1 where a row's outputs lie from right to left. Then a lane's two columns come the other way round, so that they can be stored as
// one.
__device__ __forceinline__ int mirrored(const ClipJob& clip) { return clip.stride_column < 0 ? 1 : 0; }

// What a block reads of a plane: `columns` and `rows` of samples from a first one on, in so many groups and chunks; and which chunks
// each tile of output rows needs.
struct Reach {
  int first_column, columns, groups;
  int first_row, rows, chunks;
  int begin[kBandTiles];
  unsigned int count[kBandTiles];
  // Of a float, those that tensor cores look at. A compiler that knew the number would know that the others make no difference, and
  // copy floats instead of splitting them.
  unsigned int high_bits;
  int unused;
};
static_assert(sizeof(Reach) == 48, "gpupipe/data/transform/resize.py counts it");

// What a block keeps in shared memory, one behind the other; sizes are those of ClipJob.
struct Tables {
  uint4* column_luma;    // (groups, 2, 2, 32): of each half group the high parts of its weights, as an operand, and the low ones
  uint4* column_chroma;  // (groups, 2, 32)
  float4* row_luma;      // (band / 8, chunks, 32): b0 and b1 of the high parts, and of the low ones
  float4* row_chroma;
  Taps *rows, *columns;                   // (band), (kStrip): those beyond the last are like it
  Reach *luma, *chroma;
  float *row_weights, *column_weights;  // (band, taps), (kStrip, taps): of chroma
};

__device__ __forceinline__ Tables tables_of(const ClipJob& clip) {
  extern __shared__ double shared_memory[];
  Tables t;
  t.column_luma = reinterpret_cast<uint4*>(shared_memory);
  t.column_chroma = t.column_luma + clip.luma_groups * 4 * 32;
  t.row_luma = reinterpret_cast<float4*>(t.column_chroma + clip.chroma_groups * 2 * 32);
  t.row_chroma = t.row_luma + clip.band / 8 * clip.luma_chunks * 32;
  t.rows = reinterpret_cast<Taps*>(t.row_chroma + clip.band / 8 * clip.chroma_chunks * 32);
  t.columns = t.rows + clip.band;
  t.luma = reinterpret_cast<Reach*>(t.columns + kStrip);
  t.chroma = t.luma + 1;
  t.row_weights = reinterpret_cast<float*>(t.chroma + 1);
  t.column_weights = t.row_weights + clip.band * clip.row_chroma_taps;
  return t;
}

// `first` and `end` are those of an output's samples. The first column is a multiple of `aligned`.
template <int kAligned, int kGroup, typename First, typename End>
__device__ __forceinline__ Reach reach_of(const Tables& t, int band, int rows, First first, End end) {
  Reach r;
  r.high_bits = kHighBits;
  r.unused = 0;
  r.first_column = first(t.columns[0]) & ~(kAligned - 1);
  r.columns = end(t.columns[kStrip - 1]) - r.first_column;
  r.groups = (r.columns + kGroup - 1) / kGroup;
  r.first_row = first(t.rows[0]);
  r.rows = end(t.rows[band - 1]) - r.first_row;
  r.chunks = (r.rows + 7) / 8;
#pragma unroll
  for (int tile = 0; tile < kBandTiles; ++tile) {
    r.begin[tile] = 0;
    r.count[tile] = 0;
    if (8 * tile >= rows) break;
    r.begin[tile] = (first(t.rows[8 * tile]) - r.first_row) / 8;
    r.count[tile] = (end(t.rows[8 * tile + 7]) - r.first_row + 7) / 8 - r.begin[tile];
  }
  return r;
}

__device__ __forceinline__ Reach luma_reach(const Tables& t, int band, int rows) {
  return reach_of<8, 32>(
      t, band, rows, [](const Taps& taps) { return taps.first; }, [](const Taps& taps) { return taps.first + taps.count; });
}

__device__ __forceinline__ Reach chroma_reach(const Tables& t, int band, int rows) {
  return reach_of<4, 16>(
      t, band, rows, [](const Taps& taps) { return taps.chroma_first; },
      [](const Taps& taps) { return taps.chroma_first + taps.chroma_count; });
}

__device__ __forceinline__ float in_table(const float* weights, int room, int output, int tap, int count) {
  return tap >= 0 && tap < count ? weights[output * room + tap] : 0.f;
}

// The operand for four neighbouring samples of each of a warp's four `t`: `weight(column, k)` is what sample k of this lane's four
// weighs in that column of the output. `first` and `second` are the columns of the operand's rows g and g + 8.
template <typename Weight>
__device__ __forceinline__ void fill_across(uint4* table, int lane, int first, int second, Weight weight) {
  const Halves a = split_halves(weight(first, 0), weight(first, 1)), b = split_halves(weight(second, 0), weight(second, 1));
  const Halves c = split_halves(weight(first, 2), weight(first, 3)), d = split_halves(weight(second, 2), weight(second, 3));
  table[lane] = {a.high, b.high, c.high, d.high};
  table[32 + lane] = {a.low, b.low, c.low, d.low};
}

// The operand for eight rows: `weight(output, row)` among the tile's. Samples are 2^-shift of a code.
template <typename Weight>
__device__ __forceinline__ void fill_down(float4* table, int lane, float unit, Weight weight) {
  const int output = lane / 4, row = lane % 4 * 2;
  const float a = weight(output, row) * unit, b = weight(output, row + 1) * unit;
  table[lane] = {high_part(a), high_part(b), a - high_part(a), b - high_part(b)};
}

__device__ __forceinline__ void fill_tables(const ClipJob& clip, const Tables& t, int first_row, int rows, int first_column,
                                            int columns) {
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const float unit = static_cast<float>(1 << clip.shift);
  if (thread < clip.band) t.rows[thread] = find_taps(clip.rows, first_row + min(thread, rows - 1));
  if (thread >= 32 && thread < 32 + kStrip) t.columns[thread - 32] = find_taps(clip.columns, first_column + min(thread - 32, columns - 1));
  __syncthreads();
  const int row_room = clip.row_chroma_taps, column_room = clip.column_chroma_taps;
  for (int k = thread; k < clip.band * row_room; k += kThreads)
    t.row_weights[k] = chroma_weight(clip.rows, t.rows[k / row_room], k % row_room);
  for (int k = kThreads - 1 - thread; k < kStrip * column_room; k += kThreads)  // by those that have none of the rows'
    t.column_weights[k] = chroma_weight(clip.columns, t.columns[k / column_room], k % column_room);
  const int first = lane / 4 * 2 + mirrored(clip), second = lane / 4 * 2 + 1 - mirrored(clip);
  const Reach luma = luma_reach(t, clip.band, rows);
  if (thread == 0) *t.luma = luma;
  for (int half = warp; half < 2 * luma.groups; half += kWarps) {
    const int column = luma.first_column + 32 * (half / 2) + 4 * (half % 2) + 8 * (lane % 4);
    fill_across(t.column_luma + half * 2 * 32, lane, first, second,
                [&](int output, int k) { return luma_weight(t.columns[output], column + k - t.columns[output].first); });
  }
  for (int tile = 0; tile < kBandTiles; ++tile) {
    for (int chunk = warp; chunk < static_cast<int>(luma.count[tile]); chunk += kWarps) {
      const int first = luma.first_row + 8 * (luma.begin[tile] + chunk);
      fill_down(t.row_luma + (tile * clip.luma_chunks + chunk) * 32, lane, unit, [&](int output, int row) {
        const Taps& taps = t.rows[8 * tile + output];
        return luma_weight(taps, first + row - taps.first);
      });
    }
  }
  __syncthreads();
  const Reach chroma = chroma_reach(t, clip.band, rows);
  if (thread == 0) *t.chroma = chroma;
  for (int group = warp; group < chroma.groups; group += kWarps) {
    const int column = chroma.first_column + 16 * group + 4 * (lane % 4);
    fill_across(t.column_chroma + group * 2 * 32, lane, first, second, [&](int output, int k) {
      const Taps& taps = t.columns[output];
      return in_table(t.column_weights, column_room, output, column + k - taps.chroma_first, taps.chroma_count);
    });
  }
  for (int tile = 0; tile < kBandTiles; ++tile) {
    for (int chunk = warp; chunk < static_cast<int>(chroma.count[tile]); chunk += kWarps) {
      const int first = chroma.first_row + 8 * (chroma.begin[tile] + chunk);
      fill_down(t.row_chroma + (tile * clip.chroma_chunks + chunk) * 32, lane, unit, [&](int output, int row) {
        const Taps& taps = t.rows[8 * tile + output];
        return in_table(t.row_weights, row_room, 8 * tile + output, first + row - taps.chroma_first, taps.chroma_count);
      });
    }
  }
  __syncthreads();
}

// Sums across of eight rows, (16 columns, 8 rows), as the operand of the product down.
struct Across {
  float high[4], low[4];
};

__device__ __forceinline__ Across split(const float (&sums)[4], unsigned int high_bits) {
  Across a;
  constexpr int kOrder[4] = {0, 2, 1, 3};  // row 2t of the eight is the operand's column t, and row 2t + 1 its column t + 4
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    a.high[k] = __uint_as_float(__float_as_uint(sums[kOrder[k]]) & high_bits);
    a.low[k] = sums[kOrder[k]] - a.high[k];
  }
  return a;
}

__device__ __forceinline__ void add_down(const Across& a, const float4& weights, float (&down)[4]) {
  multiply_tf32(down, a.high, weights.x, weights.y);
  multiply_tf32(down, a.low, weights.x, weights.y);
  multiply_tf32(down, a.high, weights.z, weights.w);
}

template <typename Word>
__device__ __forceinline__ void add_across(float (&across)[4], const uint4& high, const uint4& low, const Pairs& pairs,
                                           const Bits<Word>& bits) {
  const unsigned int b0 = bits.coarse(pairs.first), b1 = bits.coarse(pairs.second);
  multiply_halves(across, high, b0, b1);
  multiply_halves(across, low, b0, b1);
  if (bits.has_fine()) multiply_halves(across, high, bits.fine(pairs.first), bits.fine(pairs.second));
}

// Sums luma, or U and V, of a band and strip. A step is one group of columns of some chunks of rows; the next one's samples are
// on their way while this one's are multiplied.
template <typename Word, int kTiles, bool kChroma>
struct Summing {
  static constexpr int kPlanes = kChroma ? 2 : 1;
  static constexpr int kWeights = kChroma ? 2 * 32 : 4 * 32;  // operands of a group
  const Word* at;     // this lane's samples of the first chunk and group
  int to_v;           // from samples of U to those of V; 0 where they alternate
  int down;           // from a chunk to the next
  int across;         // from a group to the next
  int rows, columns;  // from `at` on, until there are no more
  const Reach& reach;
  const uint4* column_weights;  // of this lane
  const float4* row_weights;
  int room;  // chunks in row_weights for each tile of outputs
  const Bits<Word>& bits;

  __device__ __forceinline__ Summing(const ClipJob& clip, const Reach& reach, const Word* plane, const uint4* column_weights,
                                     const float4* row_weights, int room, const Bits<Word>& bits)
      : reach(reach), column_weights(column_weights), row_weights(row_weights), room(room), bits(bits) {
    const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4 * (kChroma ? 4 : 8);
    const int wide = kChroma && clip.interleaved ? 2 : 1, first = (reach.first_row + row) * clip.pitch + wide * (reach.first_column + column);
    at = plane + (kChroma ? clip.u_row * clip.pitch : 0) + first;
    to_v = kChroma && !clip.interleaved ? (clip.v_row - clip.u_row) * clip.pitch : 0;
    down = 8 * clip.pitch;
    across = wide * (kChroma ? 16 : 32);
    rows = reach.rows - row;
    columns = reach.columns - column;
  }

  __device__ __forceinline__ void load(int chunk, int group, Eight<Word> (&eights)[kTiles]) const {
    if (group * (kChroma ? 16 : 32) >= columns) return;
    const Word* from = at + (chunk * down + group * across);
    if (kChroma && to_v != 0) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j, from += down)
        if (8 * (chunk + j) < rows) eights[j].load(from, from + to_v);
      return;
    }
#pragma unroll
    for (int j = 0; j < kTiles; ++j, from += down)
      if (8 * (chunk + j) < rows) eights[j].load(from);
  }

  // Adds what is across of a group, having sent for the next one's samples.
  template <typename Load>
  __device__ __forceinline__ void add_group(int group, Eight<Word> (&eights)[kTiles], float (&sums)[kTiles][kPlanes][4],
                                            Load load_next) const {
    const uint4* weights = column_weights + group * kWeights;
    Pairs pairs[kTiles][2];
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int k = 0; k < 2; ++k) pairs[j][k] = kChroma ? eights[j].alternate(k) : eights[j].four(k);
    load_next();
#pragma unroll
    for (int k = 0; k < 2; ++k) {  // a half of luma's group, or a plane
      const int half = kChroma ? 0 : k, plane = kChroma ? k : 0;
      const uint4 high = weights[64 * half], low = weights[64 * half + 32];
#pragma unroll
      for (int j = 0; j < kTiles; ++j) add_across(sums[j][plane], high, low, pairs[j][k], bits);
    }
  }

  __device__ __forceinline__ void add_rows(int chunk, const float (&sums)[kTiles][kPlanes][4],
                                           float (&totals)[kPlanes][kBandTiles][4]) const {
    const unsigned int high_bits = reach.high_bits;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      Across a[kPlanes];
#pragma unroll
      for (int plane = 0; plane < kPlanes; ++plane) a[plane] = split(sums[j][plane], high_bits);
#pragma unroll
      for (int tile = 0; tile < kBandTiles; ++tile) {
        const unsigned int place = chunk + j - reach.begin[tile];
        if (place >= reach.count[tile]) continue;
        const float4 weights = row_weights[(tile * room + place) * 32];
#pragma unroll
        for (int plane = 0; plane < kPlanes; ++plane) add_down(a[plane], weights, totals[plane][tile]);
      }
    }
  }

  __device__ __forceinline__ void run(float (&totals)[kPlanes][kBandTiles][4]) const {
    const int chunks = reach.chunks, groups = reach.groups;
    Eight<Word> eights[kTiles] = {};
    load(0, 0, eights);
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; chunk += kTiles) {
      float sums[kTiles][kPlanes][4];
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int plane = 0; plane < kPlanes; ++plane)
#pragma unroll
          for (int k = 0; k < 4; ++k) sums[j][plane][k] = -kOffset;
#pragma unroll 1
      for (int group = 0; group < groups; ++group) {
        add_group(group, eights, sums, [&]() {
          const bool last = group + 1 == groups;
          const int next = last ? chunk + kTiles : chunk;
          if (next < chunks) load(next, last ? 0 : group + 1, eights);
        });
      }
      add_rows(chunk, sums, totals);
    }
  }
};

// Whether pixels of neighbouring columns can be stored together.
__device__ __forceinline__ bool stores_pairs(const ClipJob& clip, int element_bytes) {
  const bool even = ((clip.stride_time | clip.stride_channel | clip.stride_row | clip.columns.outputs) & 1) == 0;
  return abs(clip.stride_column) == 1 && even && (clip.out / element_bytes - mirrored(clip)) % 2 == 0;
}

// Pixels of two rows, and of two columns in the order in which they lie: 2 * column + row.
template <typename Out>
__device__ __forceinline__ void put(const ClipJob& clip, Out* at, bool pairs, const bool (&inside)[4], const Rgb (&pixels)[4]) {
#pragma unroll
  for (int channel = 0; channel < 3; ++channel) {
    float values[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const Rgb& c = pixels[k];
      values[k] = (channel == 0 ? c.r : channel == 1 ? c.g : c.b) * clip.gain[channel] + clip.bias[channel];
    }
    Out* to = at + channel * clip.stride_channel;
    if (pairs) {
      if (inside[0]) store_two(to, values[0], values[2]);
      if (inside[1]) store_two(to + clip.stride_row, values[1], values[3]);
      continue;
    }
#pragma unroll
    for (int k = 0; k < 4; ++k)
      if (inside[k]) store(to + k % 2 * clip.stride_row + k / 2 * abs(clip.stride_column), values[k]);
  }
}

// The pixels of two rows and two columns, out of their sums; gives the sum of their greys.
template <typename Out>
__device__ __forceinline__ float finish(const ClipJob& clip, int frame, int row, int column, bool pairs, const float (&y)[4],
                                        const float (&u)[4], const float (&v)[4]) {
  const float* m = clip.matrix;
  Rgb pixels[4];
  bool inside[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    pixels[k] = {m[3] + m[0] * y[k] + m[1] * u[k] + m[2] * v[k], m[7] + m[4] * y[k] + m[5] * u[k] + m[6] * v[k],
                 m[11] + m[8] * y[k] + m[9] * u[k] + m[10] * v[k]};
    if (clip.clamp) pixels[k] = {__saturatef(pixels[k].r), __saturatef(pixels[k].g), __saturatef(pixels[k].b)};
    inside[k] = row + k % 2 < clip.rows.outputs && column + k / 2 * (1 - 2 * mirrored(clip)) < clip.columns.outputs;
  }
  change(clip.steps, pixels, 0.f);
  const int place = frame * clip.stride_time + row * clip.stride_row + column * clip.stride_column;
  if (clip.target == kFinished) {
    put(clip, reinterpret_cast<Out*>(clip.out) + place, pairs, inside, pixels);
    return 0.f;
  }
  if (clip.target == kUnit)
    put(clip, reinterpret_cast<unsigned short*>(clip.out) + place, pairs, inside, pixels);
  else
    put(clip, reinterpret_cast<float*>(clip.out) + place, pairs, inside, pixels);
  float greys = 0.f;
#pragma unroll
  for (int k = 0; k < 4; ++k)
    if (inside[k]) greys += grey_of(pixels[k]);
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
  const int first_row = band * clip.band, first_column = strip * kStrip;
  const int rows = min(clip.band, clip.rows.outputs - first_row);
  const Tables t = tables_of(clip);
  fill_tables(clip, t, first_row, rows, first_column, min(kStrip, clip.columns.outputs - first_column));

  const Bits<Word> bits(clip.shift, clip.fine);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int element_bytes = clip.target == kFinished ? sizeof(Out) : clip.target == kUnit ? 2 : 4;
  const bool pairs = stores_pairs(clip, element_bytes);
  const int end = min(first_frame + clip.frames_a_block, clip.frames);
#pragma unroll 1
  for (int frame = first_frame + warp; frame < end; frame += kWarps) {
    const Word* plane = reinterpret_cast<const Word*>(clip.planes) + batch.source[clip.first_frame + frame] * clip.frame_samples;
    float y[1][kBandTiles][4] = {}, uv[2][kBandTiles][4] = {};
    Summing<Word, kLumaTiles, false>(clip, *t.luma, plane, t.column_luma + lane, t.row_luma + lane, clip.luma_chunks, bits).run(y);
    Summing<Word, kChromaTiles, true>(clip, *t.chroma, plane, t.column_chroma + lane, t.row_chroma + lane, clip.chroma_chunks, bits)
        .run(uv);
    float greys = 0.f;
#pragma unroll 1
    for (int row = 0; row < rows; row += 8) {
      greys += finish<Out>(clip, frame, first_row + row + lane % 4 * 2, first_column + lane / 4 * 2 + mirrored(clip), pairs, y[0][0],
                           uv[0][0], uv[1][0]);
#pragma unroll
      for (int k = 0; k < 4; ++k) {  // an index that changes would take the sums out of registers
        y[0][0][k] = y[0][1][k];
        uv[0][0][k] = uv[0][1][k];
        uv[1][0][k] = uv[1][1][k];
      }
    }
    if (clip.target == kFinished) continue;
    greys = sum_of_lanes(greys);
    if (lane == 0) reinterpret_cast<float*>(clip.sums)[(frame * clip.bands + band) * clip.strips + strip] = greys;
  }
}

#define ENTRY(name, word, out)                                                                                      \
  extern "C" __global__ void __launch_bounds__(kThreads, kBlocks<word>) name(const __grid_constant__ Batch batch) { \
    make_clips<word, out>(batch);                                                                                   \
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
