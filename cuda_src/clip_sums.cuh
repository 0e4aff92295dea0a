// Sums of samples, across and then down.
#pragma once
#include "clip_tables.cuh"

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
    const int wide = kChroma && clip.interleaved ? 2 : 1;
    const int first = (reach.first_row + row) * clip.pitch + wide * (reach.first_column + column);
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
    const int left = rows - 8 * chunk;
    if (kChroma && to_v != 0) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j, from += down)
        if (left > 8 * j) eights[j].load(from, from + to_v);
      return;
    }
#pragma unroll
    for (int j = 0; j < kTiles; ++j, from += down)
      if (left > 8 * j) eights[j].load(from);
  }

  // Adds what is across of a group, having sent for the next one's samples.
  template <int kCount, typename Load>
  __device__ __forceinline__ void add_group(int group, Eight<Word> (&eights)[kTiles], float (&sums)[kCount][kPlanes][4],
                                            Load load_next) const {
    const uint4* weights = column_weights + group * kWeights;
    Pairs pairs[kCount][2];
#pragma unroll
    for (int j = 0; j < kCount; ++j)
#pragma unroll
      for (int k = 0; k < 2; ++k) pairs[j][k] = kChroma ? eights[j].alternate(k) : eights[j].four(k);
    // What is read next goes where these came from, so they must be done with by then.
#pragma unroll
    for (int j = 0; j < kCount; ++j)
#pragma unroll
      for (int k = 0; k < 2; ++k) have_now(pairs[j][k].first, pairs[j][k].second);
    load_next();
#pragma unroll
    for (int k = 0; k < 2; ++k) {  // a half of luma's group, or a plane
      const int half = kChroma ? 0 : k, plane = kChroma ? k : 0;
      const uint4 high = weights[64 * half], low = weights[64 * half + 32];
#pragma unroll
      for (int j = 0; j < kCount; ++j) add_across(sums[j][plane], high, low, pairs[j][k], bits);
    }
  }

  template <int kCount>
  __device__ __forceinline__ void add_rows(int chunk, const float (&sums)[kCount][kPlanes][4],
                                           float (&totals)[kPlanes][kBandTiles][4]) const {
    const unsigned int high_bits = reach.high_bits;
    int place[kBandTiles];
    const float4* weights[kBandTiles];
#pragma unroll
    for (int tile = 0; tile < kBandTiles; ++tile) {
      place[tile] = chunk - reach.begin[tile];
      weights[tile] = row_weights + (tile * room + place[tile]) * 32;
    }
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      Across a[kPlanes];
#pragma unroll
      for (int plane = 0; plane < kPlanes; ++plane) a[plane] = split(sums[j][plane], high_bits);
#pragma unroll
      for (int tile = 0; tile < kBandTiles; ++tile) {
        if (static_cast<unsigned int>(place[tile] + j) >= reach.count[tile]) continue;
        const float4 some = weights[tile][j * 32];
#pragma unroll
        for (int plane = 0; plane < kPlanes; ++plane) add_down(a[plane], some, totals[plane][tile]);
      }
    }
  }

  template <int kCount>
  __device__ __forceinline__ void add_chunks(int chunk, Eight<Word> (&eights)[kTiles],
                                             float (&totals)[kPlanes][kBandTiles][4]) const {
    float sums[kCount][kPlanes][4];
#pragma unroll
    for (int j = 0; j < kCount; ++j)
#pragma unroll
      for (int plane = 0; plane < kPlanes; ++plane)
#pragma unroll
        for (int k = 0; k < 4; ++k) sums[j][plane][k] = -kOffset;
    const int groups = reach.groups;
    int group = 0;
#pragma unroll 1
    do {  // there is always one
      add_group(group, eights, sums, [&]() {
        const bool last = group + 1 == groups;
        const int next = last ? chunk + kCount : chunk;
        if (next < reach.chunks) load(next, last ? 0 : group + 1, eights);
      });
    } while (++group < groups);
    add_rows(chunk, sums, totals);
  }

  __device__ __forceinline__ void run(float (&totals)[kPlanes][kBandTiles][4]) const {
    constexpr int kFew = (kTiles + 1) / 2;
    Eight<Word> eights[kTiles] = {};
    load(0, 0, eights);
    int chunk = 0;
#pragma unroll 1
    for (; reach.chunks - chunk > kFew; chunk += kTiles) add_chunks<kTiles>(chunk, eights, totals);
    if (chunk < reach.chunks) add_chunks<kFew>(chunk, eights, totals);
  }
};
