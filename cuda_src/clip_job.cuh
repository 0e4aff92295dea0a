// What clip_resize.cu is asked to do, and the sizes of its work.
#pragma once
#include "color.cuh"
#include "sampling.cuh"

#ifndef CLIP_WARPS
#define CLIP_WARPS 4
#endif
#ifndef CLIP_LUMA_TILES
#define CLIP_LUMA_TILES 4
#endif
#ifndef CLIP_CHROMA_TILES
#define CLIP_CHROMA_TILES 2
#endif
constexpr int kWarps = CLIP_WARPS;
constexpr int kThreads = 32 * kWarps;
constexpr int kLumaTiles = CLIP_LUMA_TILES;      // of eight rows of samples, that a warp sums across together
constexpr int kChromaTiles = CLIP_CHROMA_TILES;
constexpr int kStrip = 16;                       // output columns
constexpr int kBandTiles = 2;                    // of eight output rows, at most
constexpr int kMaxClips = 8;
constexpr int kMaxFrames = 512;

enum Target { kFinished, kUnit, kFloat };

struct ClipJob {
  unsigned long long planes;  // address of the first frame
  unsigned long long out;     // of the pixel made of the first rows and columns
  unsigned long long sums;    // (frames, bands * strips) float32: of the greys
  long long frame_samples;    // from one frame to the next
  int stride_time, stride_channel, stride_row, stride_column;  // of out, in elements, along the stored axes
  Axis rows, columns;
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
static_assert(sizeof(ClipJob) == 360, "gpupipe/data/transform/resize.py packs this struct");
static_assert(sizeof(Batch) <= 4096, "as large as an argument may be");

// 1 where a row's outputs lie from right to left. Then a lane's two columns come the other way round, so that they can be stored as
// one.
__device__ __forceinline__ int mirrored(const ClipJob& clip) { return clip.stride_column < 0 ? 1 : 0; }
