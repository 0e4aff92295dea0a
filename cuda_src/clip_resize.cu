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
#include "clip_sums.cuh"
#include "store.cuh"

#ifndef CLIP_BLOCKS
#define CLIP_BLOCKS (sizeof(Word) == 1 ? 5 : 4)
#endif
template <typename Word>  // at a time on one multiprocessor, as far as registers go
constexpr int kBlocks = CLIP_BLOCKS;

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

static_assert(kBandTiles == 2, "that is how many tiles of rows are finished, one after the other");

template <typename Word, typename Out>
__device__ __forceinline__ void make_clips(const Batch& batch) {
  int number = 0;
  while (static_cast<int>(blockIdx.x) >= batch.first_block[number + 1]) ++number;
  const ClipJob& clip = batch.clips[number];
  const int block = blockIdx.x - batch.first_block[number];
  Part part{block / clip.strips % clip.bands, block % clip.strips, 0, block / clip.strips / clip.bands * clip.frames_a_block};
  part.rows = min(clip.band, clip.rows.outputs - part.band * clip.band);
  const Tables t = tables_of(clip);
  if (threadIdx.x == 0) *t.part = part;
  fill_tables(clip, t, part);

  const Bits<Word> bits(clip.shift, clip.fine);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int element_bytes = clip.target == kFinished ? sizeof(Out) : clip.target == kUnit ? 2 : 4;
  const bool pairs = stores_pairs(clip, element_bytes);
  const int end = min(part.first_frame + clip.frames_a_block, clip.frames);
#pragma unroll 1
  for (int frame = part.first_frame + warp; frame < end; frame += kWarps) {
    const Word* plane = reinterpret_cast<const Word*>(clip.planes) + batch.source[clip.first_frame + frame] * clip.frame_samples;
    float y[1][kBandTiles][4] = {}, uv[2][kBandTiles][4] = {};
    Summing<Word, kLumaTiles, false>(clip, *t.luma, plane, t.column_luma + lane, t.row_luma + lane, clip.luma_chunks, bits).run(y);
    Summing<Word, kChromaTiles, true>(clip, *t.chroma, plane, t.column_chroma + lane, t.row_chroma + lane, clip.chroma_chunks, bits)
        .run(uv);
    float greys = 0.f;
    const int first_row = t.part->band * clip.band + lane % 4 * 2;
    const int column = t.part->strip * kStrip + lane / 4 * 2 + mirrored(clip);
#pragma unroll 1
    for (int row = 0; row < t.part->rows; row += 8) {
      greys += finish<Out>(clip, frame, first_row + row, column, pairs, y[0][0], uv[0][0], uv[1][0]);
#pragma unroll
      for (int k = 0; k < 4; ++k) {  // an index that changes would take the sums out of registers
        y[0][0][k] = y[0][1][k];
        uv[0][0][k] = uv[0][1][k];
        uv[1][0][k] = uv[1][1][k];
      }
    }
    if (clip.target == kFinished) continue;
    greys = sum_of_lanes(greys);
    if (lane == 0) reinterpret_cast<float*>(clip.sums)[(frame * clip.bands + t.part->band) * clip.strips + t.part->strip] = greys;
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
