// The weights of a strip and a band, and what they make a block read.
#pragma once
#include "clip_job.cuh"
#include "samples.cuh"

// What a block reads of a plane: `columns` and `rows` of samples from a first one on, in so many groups and chunks; and which
// chunks each tile of output rows needs.
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

// What of the clip a block makes. It is kept in memory too, because a warp needs it before and after what takes all its registers.
struct Part {
  int band, strip;
  int rows;  // of output
  int first_frame;
};

// What a block keeps in shared memory, one behind the other; sizes are those of ClipJob.
struct Tables {
  uint4* column_luma;    // (groups, 2, 2, 32): of each half group the high parts of its weights, as an operand, and the low ones
  uint4* column_chroma;  // (groups, 2, 32)
  float4* row_luma;      // (band / 8, chunks, 32): b0 and b1 of the high parts, and of the low ones
  float4* row_chroma;
  Taps *rows, *columns;                   // (band), (kStrip): those beyond the last are like it
  Reach *luma, *chroma;
  Part* part;
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
  t.part = reinterpret_cast<Part*>(t.chroma + 1);
  t.row_weights = reinterpret_cast<float*>(t.part + 1);
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

__device__ __forceinline__ void fill_tables(const ClipJob& clip, const Tables& t, const Part& part) {
  const int first_row = part.band * clip.band, rows = part.rows;
  const int first_column = part.strip * kStrip, columns = min(kStrip, clip.columns.outputs - first_column);
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const float unit = static_cast<float>(1 << clip.shift);
  if (thread < clip.band) t.rows[thread] = find_taps(clip.rows, first_row + min(thread, rows - 1));
  if (thread >= 32 && thread < 32 + kStrip)
    t.columns[thread - 32] = find_taps(clip.columns, first_column + min(thread - 32, columns - 1));
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
