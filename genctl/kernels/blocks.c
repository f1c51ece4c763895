/* Weights in blocks of 32 numbers, as GGUF files hold them (ggml: block_q8_0, block_q4_0, block_q4_K and so on), and 4 bits of
   our own.

   Sixteen outputs lie side by side: lane l adds up output l, four exact products at a time, so that no lanes are added up in
   the end. A block's sum is an exact integer, and each block is one fused multiplication and addition: the same bits on every
   instruction set, in any batch. x is quantised for each 32 numbers by its largest, as ggml does. */
#include "amx.h"
#include "dots.h"
#include "tiles.h"

#ifdef PAIRS
#define IN_PAIRS (bits < 8)
#else
#define IN_PAIRS 0
#define pairs dotu
#define wide(sum) sum
#endif
/* What the sum of a block begins with: it takes back what makes codes unsigned. */
IN int32_t unsigned_by(const int bits, const int scales) { return scales == RANGES || scales == SIXES ? 0 : bits == 8 ? SHIFT : 1 << (bits - 1); }

/* r rows by c times 16 outputs, which are `apart` from each other */
IN void tile_blocks(const Job *job, int64_t row, int64_t o, int64_t apart, const int c, const int bits, const int scales, const int r) {
  const int64_t in = job->w->in, width = job->width, groups = in / 32, line = apart * in * bits / 8;
  const int by = unsigned_by(bits, scales), part = scales == SIXTEENS ? 4 : 8; /* steps that share a scale */
  const int few = IN_PAIRS ? 8 >> (bits - 4) : part;                           /* steps whose sums are widened at once */
  const uint8_t *w = (const uint8_t *)job->w->w + o * in * bits / 8;
  const float *x_scale = job->largest + row * 2 * groups;
  const int8_t *x = job->codes + row * width;
  const int32_t *begin = job->total + row * 2 * groups;
  int8_t sixes[C][256] __attribute__((aligned(64)));
  F s[TALL][C], scale[C][2];
  UNROLL for (int i = 0; i < r; i++) UNROLL for (int j = 0; j < c; j++) s[i][j] = all(0);
  for (int64_t g = 0; g < groups; g++, w += 64 * bits, x += 32, x_scale += 2, begin += 2) {
    I sum[TALL][C], whole[TALL][C];
    UNROLL for (int j = 0; j < c; j++) scales_of(job->w, o + j * apart, g, scales, scale[j], sixes[j]);
    DEEP for (int q = 0; q < 8; q++) {
      if (q % few == 0) UNROLL for (int i = 0; i < r; i++) UNROLL for (int j = 0; j < c; j++) sum[i][j] = iall(by && !IN_PAIRS ? begin[i * 2 * groups + q / part] : 0);
      B codes[C];
      UNROLL for (int j = 0; j < c; j++) {
        const uint8_t *at = w + j * line;
        if (bits == 8 || q < bits) __builtin_prefetch(at + 64 * q + (c > 1 ? AHEAD_IN_RUNS(r) : 6144), 0, 2);
        codes[j] = bits == 8 ? shifted(ldc(at + 64 * q)) : codes_of(at, q, bits);
      }
      UNROLL for (int i = 0; i < r; i++) {
        const B u = four(x + i * width + 4 * q);
        UNROLL for (int j = 0; j < c; j++)
          sum[i][j] = bits == 8 ? dots(sum[i][j], codes[j], u) : IN_PAIRS ? pairs(sum[i][j], codes[j], u) : dotu(sum[i][j], codes[j], u);
      }
      if ((q + 1) % few == 0) UNROLL for (int i = 0; i < r; i++) UNROLL for (int j = 0; j < c; j++) {
        if (!IN_PAIRS) whole[i][j] = sum[i][j];
        else if (q % part >= few) whole[i][j] = iadd(wide(sum[i][j]), whole[i][j]);
        else whole[i][j] = by ? iadd(wide(sum[i][j]), iall(begin[i * 2 * groups + q / part])) : wide(sum[i][j]);
        if ((q + 1) % part == 0) s[i][j] = fma16(real(whole[i][j]), mul(scale[j][q / part], all(x_scale[i * groups * 2])), s[i][j]);
      }
    }
    if (has_offsets(scales)) UNROLL for (int i = 0; i < r; i++) UNROLL for (int j = 0; j < c; j++)
      s[i][j] = fma16(scale[j][1], all(x_scale[i * groups * 2 + 1]), s[i][j]);
  }
  UNROLL for (int i = 0; i < r; i++) UNROLL for (int j = 0; j < c; j++) put16(job, row + i, o + j * apart, job->w->out - o - j * apart, s[i][j]);
}
IN void rows_of_blocks(const Job *job, int64_t from, int64_t to, const int bits, const int scales) {
  const int64_t rows = job->rows;
  int64_t o = from;
  if (job->runs && rows == 1) { /* with more rows one stream is as fast */
    const int64_t apart = (to - from) / (16 * C) * 16;
    for (; o < from + apart; o += 16) tile_blocks(job, 0, o, apart, C, bits, scales, 1);
    o = from + C * apart;
  }
  for (; o < to; o += 16) {
    int64_t row = 0;
    EACH_TILE(row, rows, TALL, tile_blocks, job, row, o, 0, 1, bits, scales)
  }
}
#if defined(__AVX2__) || defined(__aarch64__)
#define KIND(b, s) if (bits == b && scales == s) rows_of_blocks(job, from, to, b, s)
#else
#define KIND(b, s) /* one for all of them: in plain C each takes seconds to compile */
#endif
void blocks(const Job *job, int64_t from, int64_t to) {
  const int bits = job->w->form, scales = job->w->type;
  if (is_tiled(job)) outputs_amx_blocks(job, from, to);
  else KIND(8, HALVES); else KIND(6, SIXTEENS);
  else KIND(5, HALVES); else KIND(5, RANGES); else KIND(5, SIXES);
  else KIND(4, HALVES); else KIND(4, RANGES); else KIND(4, SHORTS); else KIND(4, SIXES);
  else rows_of_blocks(job, from, to, bits, scales);
}

/* A row of x: codes; of each 32 their scale, and their sum times it; and what the sum of a block, or of half a block, begins with. */
void code_blocks(void *p, int row) {
  const Job *job = p;
  const int64_t groups = job->w->in / 32;
  const int scales = job->w->type, by = unsigned_by(job->w->form, scales);
  int8_t *codes = (int8_t *)job->codes + row * job->width;
  int32_t *begin = (int32_t *)job->total + row * 2 * groups;
  const int beside = is_tiled(job) ? 16 : 1; /* rows */
  float *scale = (float *)job->largest + (row / beside * 2 * groups) * beside + row % beside;
  for (int64_t g = 0; g < groups; g++, begin += 2, codes += 32, scale += 2 * beside) {
    float largest;
    const int32_t sum = coded(job, row, 32 * g, 32 * g + 32, &largest, codes);
    *scale = largest / 127.0f;
    scale[beside] = (float)sum * *scale;
    begin[0] = -by * sum;
    if (scales == SIXTEENS) {
      int32_t second = 0;
      for (int k = 16; k < 32; k++) second += codes[k];
      begin[0] = -by * (sum - second), begin[1] = -by * second;
    }
  }
}
