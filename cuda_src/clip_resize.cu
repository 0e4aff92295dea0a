// Decoded planes to finished clips where sampling runs along the axes: crop, antialiased resize, chroma upsampling, rotation by
// quarter turns, flip, YUV to RGB, normalisation, dtype and layout, for several clips in one launch. The truth it must equal is
// gpupipe/data/transform/reference.py.
//
// A block makes some output rows of a strip of output columns, for a few frames of one clip. Down first: each thread sums rows of
// four neighbouring samples, which it reads as one word, so that a frame is read in whole lines and no sample is fetched by
// itself. Then across, out of shared memory. "Rows" and "columns" are those of the stored frame; turning it is a matter of the
// output's strides.
#include "sampling.cuh"
#include "store.cuh"

constexpr int kThreads = 256;
constexpr int kBlocks = 3;  // at a time on one multiprocessor, as far as registers go
constexpr int kMaxClips = 8;
constexpr int kMaxFrames = 320;

struct ClipJob {
  unsigned long long planes;  // address of the first frame
  unsigned long long out;
  long long stride_time, stride_channel, stride_row, stride_column;  // of out, in elements, along the stored axes
  long long frame_samples;                                           // from one frame to the next
  Axis rows, columns;
  float matrix[12];         // (3, 4): sample codes to RGB in [0, 1]
  float gain[3], bias[3];   // value = RGB * gain + bias
  int pitch;                // samples from one row to the next
  int u_row, v_row;         // of chroma row 0, in rows of the frame
  int interleaved;          // U and V alternate in the rows from u_row on
  int clamp;                // RGB is held within [0, 1]
  int first_frame, frames;  // among source and target
  int unused;
};

struct Batch {
  ClipJob clips[kMaxClips];
  int first_group[kMaxClips + 1];  // of blocks along z: those of a clip each make frames_a_block of its frames
  int frames_a_block;
  int rows_a_block, columns_a_block;
  int span, chroma_span;  // samples that a strip's sums have room for, multiples of 4
  int row_taps, row_chroma_taps, column_chroma_taps;  // room in the tables of weights
  short source[kMaxFrames], target[kMaxFrames];       // frame in planes, frame of the clip
};
static_assert(sizeof(ClipJob) == 288, "gpupipe/data/transform/resize.py packs this struct");
static_assert(sizeof(Batch) == 3656, "gpupipe/data/transform/resize.py packs this struct");

// Four samples of one row. A sample is below 2^16, so as the low bits of 2^23's float it is exact, and taking 2^23 off leaves it:
// cheaper than a conversion.
struct Four {
  float a, b, c, d;
};

template <unsigned int kSelector>
__device__ __forceinline__ float sample_of(unsigned int word) {
  return __uint_as_float(__byte_perm(word, 0x4B000000u, kSelector)) - 8388608.f;
}

__device__ __forceinline__ Four load_four(const unsigned char* at) {
  const unsigned int word = *reinterpret_cast<const unsigned int*>(at);
  return {sample_of<0x7440>(word), sample_of<0x7441>(word), sample_of<0x7442>(word), sample_of<0x7443>(word)};
}

__device__ __forceinline__ Four load_four(const unsigned short* at) {
  const uint2 words = *reinterpret_cast<const uint2*>(at);
  return {sample_of<0x7410>(words.x), sample_of<0x7432>(words.x), sample_of<0x7410>(words.y), sample_of<0x7432>(words.y)};
}

// Weighted sums of `count` rows, for four neighbouring samples. `at` is the first row's.
template <typename Word>
__device__ __forceinline__ float4 sum_down(const Word* at, int pitch, const float* weights, int count) {
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
  for (int tap = 0; tap < count; ++tap) {
    const Four four = load_four(at + static_cast<long long>(tap) * pitch);
    const float weight = weights[tap];
    sum.x += weight * four.a;
    sum.y += weight * four.b;
    sum.z += weight * four.c;
    sum.w += weight * four.d;
  }
  return sum;
}

// What a block keeps in shared memory, one behind the other; sizes in floats are those of Batch.
struct Tables {
  Taps *rows, *columns;
  float *row_luma, *row_chroma;  // (rows_a_block, taps)
  float* column_chroma;          // (taps, columns_a_block)
  float *luma, *chroma;          // sums down: (rows_a_block, span), (rows_a_block, 2 chroma_span)
};

__device__ __forceinline__ Tables tables_of(const Batch& batch) {
  extern __shared__ double shared_memory[];
  Tables t;
  t.luma = reinterpret_cast<float*>(shared_memory);
  t.chroma = t.luma + batch.rows_a_block * batch.span;
  t.rows = reinterpret_cast<Taps*>(t.chroma + batch.rows_a_block * 2 * batch.chroma_span);
  t.columns = t.rows + batch.rows_a_block;
  t.row_luma = reinterpret_cast<float*>(t.columns + batch.columns_a_block);
  t.row_chroma = t.row_luma + batch.rows_a_block * batch.row_taps;
  t.column_chroma = t.row_chroma + batch.rows_a_block * batch.row_chroma_taps;
  return t;
}

// Goes through the cells of a (rows, width) table, kThreads apart, without a division for each.
struct Cells {
  int width, row, column, row_step, column_step;
  __device__ __forceinline__ explicit Cells(int cells_width)
      : width(cells_width),
        row(threadIdx.x / cells_width),
        column(threadIdx.x % cells_width),
        row_step(kThreads / cells_width),
        column_step(kThreads % cells_width) {}
  __device__ __forceinline__ void next() {
    row += row_step;
    column += column_step;
    if (column >= width) {
      column -= width;
      ++row;
    }
  }
};

// Samples of an axis that a strip of outputs reads, and whose sums are kept; begin is a multiple of 4.
struct Strip {
  int begin, count;
};

__device__ __forceinline__ Strip strip_of(int first, int end) {
  const int begin = first & ~3;
  return {begin, (end - begin + 3) & ~3};
}

template <typename Word, typename Out>
__device__ __forceinline__ void make_rows(const Batch& batch) {
  const Tables t = tables_of(batch);
  const int thread = threadIdx.x;
  int number = 0;
  while (static_cast<int>(blockIdx.z) >= batch.first_group[number + 1]) ++number;
  const ClipJob& clip = batch.clips[number];
  const int first_row = blockIdx.x * batch.rows_a_block, first_column = blockIdx.y * batch.columns_a_block;
  const int rows = min(batch.rows_a_block, clip.rows.outputs - first_row);
  const int columns = min(batch.columns_a_block, clip.columns.outputs - first_column);
  if (rows <= 0 || columns <= 0) return;

  for (int k = thread; k < rows + columns; k += kThreads) {
    if (k < rows)
      t.rows[k] = find_taps(clip.rows, first_row + k);
    else
      t.columns[k - rows] = find_taps(clip.columns, first_column + k - rows);
  }
  __syncthreads();
  for (int k = thread; k < rows * batch.row_taps; k += kThreads)
    t.row_luma[k] = luma_weight(t.rows[k / batch.row_taps], k % batch.row_taps);
  for (int k = thread; k < rows * batch.row_chroma_taps; k += kThreads)
    t.row_chroma[k] = chroma_weight(clip.rows, t.rows[k / batch.row_chroma_taps], k % batch.row_chroma_taps);
  for (int k = thread; k < columns * batch.column_chroma_taps; k += kThreads)
    t.column_chroma[k / columns * batch.columns_a_block + k % columns] =
        chroma_weight(clip.columns, t.columns[k % columns], k / columns);
  const Taps &left = t.columns[0], &right = t.columns[columns - 1];  // the other way round when mirrored
  const Strip luma = strip_of(min(left.first, right.first), max(left.first + left.count, right.first + right.count));
  const Strip chroma = strip_of(min(left.chroma_first, right.chroma_first),
                                max(left.chroma_first + left.chroma_count, right.chroma_first + right.chroma_count));
  __syncthreads();

  // U and V lie in one row with U V U V ..., or V's sums follow U's by chroma_span.
  const int chroma_step = clip.interleaved ? 2 : 1, chroma_apart = clip.interleaved ? 1 : batch.chroma_span;
  const int luma_fours = luma.count / 4, chroma_fours = 2 * chroma.count / 4;
  const int begin = (blockIdx.z - batch.first_group[number]) * batch.frames_a_block;
  const int end = min(begin + batch.frames_a_block, clip.frames);
  for (int frame = begin; frame < end; ++frame) {
    const Word* plane = reinterpret_cast<const Word*>(clip.planes) + batch.source[clip.first_frame + frame] * clip.frame_samples;
    for (Cells cell(luma_fours + chroma_fours); cell.row < rows; cell.next()) {
      const int row = cell.row, four = cell.column;
      const Taps& taps = t.rows[row];
      if (four < luma_fours) {
        const Word* at = plane + static_cast<long long>(taps.first) * clip.pitch + luma.begin + 4 * four;
        const float4 sum = sum_down(at, clip.pitch, t.row_luma + row * batch.row_taps, taps.count);
        *reinterpret_cast<float4*>(t.luma + row * batch.span + 4 * four) = sum;
      } else {
        int texel = 4 * (four - luma_fours), chroma_row = clip.u_row, target = texel;
        if (!clip.interleaved && texel >= chroma.count) {
          texel -= chroma.count;
          chroma_row = clip.v_row;
          target = batch.chroma_span + texel;
        }
        const long long first_sample = static_cast<long long>(chroma_row + taps.chroma_first) * clip.pitch;
        const Word* at = plane + first_sample + chroma_step * chroma.begin + texel;
        const float4 sum = sum_down(at, clip.pitch, t.row_chroma + row * batch.row_chroma_taps, taps.chroma_count);
        *reinterpret_cast<float4*>(t.chroma + row * 2 * batch.chroma_span + target) = sum;
      }
    }
    __syncthreads();
    Out* out = reinterpret_cast<Out*>(clip.out) + batch.target[clip.first_frame + frame] * clip.stride_time +
               first_row * clip.stride_row + first_column * clip.stride_column;
    for (Cells cell(columns); cell.row < rows; cell.next()) {
      const int row = cell.row, column = cell.column;
      const Taps& taps = t.columns[column];
      const float* sums = t.luma + row * batch.span + taps.first - luma.begin;
      float y = 0.f;
      for (int tap = 0; tap < taps.count; ++tap) y += triangle(taps, tap) * sums[tap];
      y *= taps.norm;
      const float* chroma_sums = t.chroma + row * 2 * batch.chroma_span + chroma_step * (taps.chroma_first - chroma.begin);
      float u = 0.f, v = 0.f;
      for (int tap = 0; tap < taps.chroma_count; ++tap) {
        const float weight = t.column_chroma[tap * batch.columns_a_block + column];
        u += weight * chroma_sums[chroma_step * tap];
        v += weight * chroma_sums[chroma_step * tap + chroma_apart];
      }
#pragma unroll 1  // unrolled, it takes more registers than there are
      for (int channel = 0; channel < 3; ++channel) {
        const float* m = clip.matrix + 4 * channel;
        float rgb = m[0] * y + m[1] * u + m[2] * v + m[3];
        if (clip.clamp) rgb = fminf(fmaxf(rgb, 0.f), 1.f);
        store(out + row * clip.stride_row + column * clip.stride_column + channel * clip.stride_channel,
              rgb * clip.gain[channel] + clip.bias[channel]);
      }
    }
    __syncthreads();
  }
}

#define ENTRY(name, word, out)                                                                       \
  extern "C" __global__ void __launch_bounds__(kThreads, kBlocks) name(const __grid_constant__ Batch batch) { \
    make_rows<word, out>(batch);                                                                     \
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
