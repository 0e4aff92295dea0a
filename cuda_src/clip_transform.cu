// Decoded planes to a finished clip in one pass: crop, antialiased resize, chroma upsampling, rotation, flip, YUV to RGB,
// normalisation, dtype and layout. The truth it must equal is gpupipe/data/transform/reference.py.
//
// A block makes a tile of output pixels for a few frames. Weights depend only on the output's row and column, so they are worked
// out once a block into shared memory; a shrink too strong for that computes each weight where it is used. Samples are fetched
// through a texture as whole numbers: its own bilinear filter has 8-bit weights, which is too coarse.
#include "sampling.cuh"
#include "store.cuh"

constexpr int kTileWidth = 32;
constexpr int kTileHeight = 8;
constexpr int kThreads = kTileWidth * kTileHeight;
constexpr int kMaxFrames = 256;

struct ClipParams {
  unsigned long long texture;  // one channel of 8 or 16 bits: the rows of all frames, one frame below the other
  unsigned long long out;
  long long stride_time, stride_channel, stride_row, stride_column;  // of out, in elements
  Axis rows, columns;                                                // of the stored frame
  float matrix[12];                                                  // (3, 4): sample codes to RGB in [0, 1]
  float gain[3], bias[3];                                            // value = RGB * gain + bias
  int transposed;  // output rows run along stored columns
  int height, width;
  int frames, frames_per_block;
  int first_row, frame_rows;             // texture row of frame 0, rows of a frame
  int u_row, v_row, u_column, v_column;  // of chroma sample (0, 0) in its frame
  int chroma_pitch;                      // texels from one chroma column to the next: 1, or 2 when U and V alternate
  int tabled;                            // weights are kept in shared memory
  int clamp;                             // RGB is held within [0, 1]
  short source[kMaxFrames];  // frame in the texture
  short target[kMaxFrames];  // frame of the clip
};
static_assert(sizeof(ClipParams) == 1328, "gpupipe/data/transform/kernel.py packs this struct");

// A sample is below 2^16, so as the low bits of 2^23's float it is exact, and taking 2^23 off leaves it: cheaper than a conversion.
template <typename Word>
__device__ __forceinline__ float fetch(unsigned long long texture, float column, float row) {
  const unsigned int code = tex2D<Word>(static_cast<cudaTextureObject_t>(texture), column, row);
  return __uint_as_float(0x4B000000u | code) - 8388608.f;
}

// Weights of one output along one axis, read from a table whose rows are taps: neighbouring threads read neighbouring words.
struct Tabled {
  const float *luma_table, *chroma_table;
  int slots;
  __device__ __forceinline__ float luma(int tap) const { return luma_table[tap * slots]; }
  __device__ __forceinline__ float chroma(int tap) const { return chroma_table[tap * slots]; }
};

struct Computed {
  const Axis& axis;
  const Taps& taps;
  __device__ __forceinline__ float luma(int tap) const { return luma_weight(taps, tap); }
  __device__ __forceinline__ float chroma(int tap) const { return chroma_weight(axis, taps, tap); }
};

template <typename Word, typename Out, typename Weights>
__device__ __forceinline__ void make_pixels(const ClipParams& p, const Taps& row, const Taps& column, const Weights& down,
                                            const Weights& across, int y, int x) {
  const int begin = blockIdx.z * p.frames_per_block;
  const int end = min(begin + p.frames_per_block, p.frames);
  for (int frame = begin; frame < end; ++frame) {
    const int top = p.first_row + p.source[frame] * p.frame_rows;

    float luma = 0.f;
    for (int r = 0; r < row.count; ++r) {
      const float at_row = static_cast<float>(top + row.first + r) + 0.5f;
      float sum = 0.f;
      for (int c = 0; c < column.count; ++c) {
        sum += across.luma(c) * fetch<Word>(p.texture, static_cast<float>(column.first + c) + 0.5f, at_row);
      }
      luma += down.luma(r) * sum;
    }

    float u = 0.f, v = 0.f;
    for (int r = 0; r < row.chroma_count; ++r) {
      const float u_row = static_cast<float>(top + p.u_row + row.chroma_first + r) + 0.5f;
      const float v_row = static_cast<float>(top + p.v_row + row.chroma_first + r) + 0.5f;
      float u_sum = 0.f, v_sum = 0.f;
      for (int c = 0; c < column.chroma_count; ++c) {
        const float weight = across.chroma(c);
        const int texel = p.chroma_pitch * (column.chroma_first + c);
        u_sum += weight * fetch<Word>(p.texture, static_cast<float>(p.u_column + texel) + 0.5f, u_row);
        v_sum += weight * fetch<Word>(p.texture, static_cast<float>(p.v_column + texel) + 0.5f, v_row);
      }
      const float weight = down.chroma(r);
      u += weight * u_sum;
      v += weight * v_sum;
    }

    Out* out = reinterpret_cast<Out*>(p.out) + p.target[frame] * p.stride_time + y * p.stride_row + x * p.stride_column;
#pragma unroll
    for (int channel = 0; channel < 3; ++channel) {
      const float* m = p.matrix + 4 * channel;
      float rgb = m[0] * luma + m[1] * u + m[2] * v + m[3];
      if (p.clamp) rgb = fminf(fmaxf(rgb, 0.f), 1.f);
      store(out + channel * p.stride_channel, rgb * p.gain[channel] + p.bias[channel]);
    }
  }
}

// Dynamic shared memory: Taps[32 + 8], the columns' first; then, when tabled, four tables of weights: columns' luma and
// chroma, rows' luma and chroma, each (max taps, slots).
template <typename Word, typename Out>
__device__ __forceinline__ void make_tile(const ClipParams& p) {
  extern __shared__ double shared_memory[];
  Taps* taps = reinterpret_cast<Taps*>(shared_memory);
  const int column_slots = p.transposed ? kTileHeight : kTileWidth;
  const int row_slots = p.transposed ? kTileWidth : kTileHeight;
  float* column_luma = reinterpret_cast<float*>(taps + kTileWidth + kTileHeight);
  float* column_chroma = column_luma + column_slots * p.columns.max_taps;
  float* row_luma = column_chroma + column_slots * p.columns.max_chroma_taps;
  float* row_chroma = row_luma + row_slots * p.rows.max_taps;

  const int thread = threadIdx.y * kTileWidth + threadIdx.x;
  const int tile_y = blockIdx.y * kTileHeight, tile_x = blockIdx.x * kTileWidth;
  if (thread < kTileWidth + kTileHeight) {
    const bool is_column = thread < column_slots;
    const int slot = is_column ? thread : thread - column_slots;
    const Axis& axis = is_column ? p.columns : p.rows;
    const int output = slot + (is_column == (p.transposed != 0) ? tile_y : tile_x);
    taps[thread] = find_taps(axis, min(output, axis.outputs - 1));
  }
  __syncthreads();
  if (p.tabled) {
    for (int k = thread; k < column_slots * p.columns.max_taps; k += kThreads)
      column_luma[k] = luma_weight(taps[k % column_slots], k / column_slots);
    for (int k = thread; k < column_slots * p.columns.max_chroma_taps; k += kThreads)
      column_chroma[k] = chroma_weight(p.columns, taps[k % column_slots], k / column_slots);
    for (int k = thread; k < row_slots * p.rows.max_taps; k += kThreads)
      row_luma[k] = luma_weight(taps[column_slots + k % row_slots], k / row_slots);
    for (int k = thread; k < row_slots * p.rows.max_chroma_taps; k += kThreads)
      row_chroma[k] = chroma_weight(p.rows, taps[column_slots + k % row_slots], k / row_slots);
    __syncthreads();
  }

  const int y = tile_y + threadIdx.y, x = tile_x + threadIdx.x;
  if (y >= p.height || x >= p.width) return;
  const int column = p.transposed ? threadIdx.y : threadIdx.x;
  const int row = p.transposed ? threadIdx.x : threadIdx.y;
  const Taps &across = taps[column], &down = taps[column_slots + row];
  if (p.tabled) {
    make_pixels<Word, Out>(p, down, across, Tabled{row_luma + row, row_chroma + row, row_slots},
                           Tabled{column_luma + column, column_chroma + column, column_slots}, y, x);
  } else {
    make_pixels<Word, Out>(p, down, across, Computed{p.rows, down}, Computed{p.columns, across}, y, x);
  }
}

#define ENTRY(name, word, out)                                                                        \
  extern "C" __global__ void __launch_bounds__(kThreads) name(const __grid_constant__ ClipParams p) { \
    make_tile<word, out>(p);                                                                          \
  }
#ifdef CLIP_ENTRY  // at run time only the entry that is wanted is compiled: all of them take two seconds
ENTRY(CLIP_ENTRY, CLIP_WORD, CLIP_OUT)
#else
ENTRY(clip_u8_float32, unsigned char, float)
ENTRY(clip_u8_float16, unsigned char, __half)
ENTRY(clip_u8_bfloat16, unsigned char, __nv_bfloat16)
ENTRY(clip_u8_uint8, unsigned char, unsigned char)
ENTRY(clip_u16_float32, unsigned short, float)
ENTRY(clip_u16_float16, unsigned short, __half)
ENTRY(clip_u16_bfloat16, unsigned short, __nv_bfloat16)
ENTRY(clip_u16_uint8, unsigned short, unsigned char)
#endif
