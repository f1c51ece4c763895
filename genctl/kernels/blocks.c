/* Weights in blocks of 32 numbers, as GGUF files hold them (ggml: block_q8_0, block_q4_0, block_q4_K and so on), and 4 bits of
   our own.

   Sixteen outputs lie side by side: lane l adds up output l, four exact products at a time, so that no lanes are added up in
   the end. A block's sum is an exact integer, and each block is one fused multiplication and addition: the same bits on every
   instruction set, in any batch. x is quantised for each 32 numbers by its largest, as ggml does. */
#include "amx.h"
#include "dots.h"
#include "tiles.h"

#ifdef PAIRS
#define IN_PAIRS !eight
#else
#define IN_PAIRS 0
#define pairs dotu
#define wide(sum) sum
#endif
/* What the sum of a block begins with: it takes back what makes codes unsigned. */
IN int32_t unsigned_by(const int eight, const int scales) { return scales == RANGES ? 0 : eight ? SHIFT : 8; }

/* r rows by c times 16 outputs, which are `apart` from each other */
IN void tile_blocks(const Job *job, int64_t row, int64_t o, int64_t apart, const int c, const int eight, const int scales, const int r) {
  const int64_t in = job->w->in, width = job->width, groups = in / 32;
  const int size = eight ? 64 : 32, is_signed = eight && scales != RANGES;
  const int64_t line = apart * in * size / 64;
  const uint8_t *w = (const uint8_t *)job->w->w + o * in * size / 64;
  const uint16_t *half = job->w->range + o * groups;
  const uint16_t *brief = job->w->range + 2 * o * groups;
  const float *both = job->w->scale + 2 * o * groups, *x_scale = job->largest + row * 2 * groups;
  const int8_t *x = job->codes + row * width;
  const int32_t *begin = job->total + row * 2 * groups;
  F s[TALL][C], scale[C], second[C];
  UNROLL for (int i = 0; i < r; i++) UNROLL for (int j = 0; j < c; j++) s[i][j] = all(0);
  for (int64_t g = 0; g < groups; g++) {
    I sum[TALL][C];
    UNROLL for (int j = 0; j < c; j++) {
      const int64_t at = j * apart * groups + 16 * g;
      scale[j] = scales == HALVES ? ldh(half + at) : scales == SHORTS ? ldb(brief + 2 * at) : ld(both + 2 * at);
      second[j] = scales == HALVES ? scale[j] : scales == SHORTS ? ldb(brief + 2 * at + 16) : ld(both + 2 * at + 16);
    }
    UNROLL for (int i = 0; i < r; i++) UNROLL for (int j = 0; j < c; j++)
      sum[i][j] = iall(unsigned_by(eight, scales) && !IN_PAIRS ? begin[i * 2 * groups + 2 * g] : 0);
    DEEP for (int q = 0; q < 8; q++, w += size) {
      if (scales == SIXTEENS && q == 4) UNROLL for (int i = 0; i < r; i++) UNROLL for (int j = 0; j < c; j++) {
        s[i][j] = fma16(real(sum[i][j]), mul(scale[j], all(x_scale[(i * groups + g) * 2])), s[i][j]);
        sum[i][j] = iall(begin[i * 2 * groups + 2 * g + 1]);
      }
      B codes[C];
      UNROLL for (int j = 0; j < c; j++) {
        const uint8_t *at = w + j * line;
        if (eight || !(q & 1)) __builtin_prefetch(at + (c > 1 ? AHEAD_IN_RUNS(r) : 6144), 0, 2);
        codes[j] = eight ? is_signed ? shifted(ldc(at)) : ldc(at) : nibbles(at);
      }
      UNROLL for (int i = 0; i < r; i++) {
        const B u = four(x + i * width + 32 * g + 4 * q);
        UNROLL for (int j = 0; j < c; j++)
          sum[i][j] = is_signed ? dots(sum[i][j], codes[j], u) : IN_PAIRS ? pairs(sum[i][j], codes[j], u) : dotu(sum[i][j], codes[j], u);
      }
    }
    UNROLL for (int i = 0; i < r; i++) UNROLL for (int j = 0; j < c; j++) {
      if (IN_PAIRS) sum[i][j] = iadd(wide(sum[i][j]), iall(unsigned_by(eight, scales) ? begin[i * 2 * groups + 2 * g] : 0));
      s[i][j] = fma16(real(sum[i][j]), mul(scales == SIXTEENS ? second[j] : scale[j], all(x_scale[(i * groups + g) * 2])), s[i][j]);
      if (scales == RANGES || scales == SHORTS) s[i][j] = fma16(second[j], all(x_scale[(i * groups + g) * 2 + 1]), s[i][j]);
    }
  }
  UNROLL for (int i = 0; i < r; i++) UNROLL for (int j = 0; j < c; j++) put16(job, row + i, o + j * apart, job->w->out - o - j * apart, s[i][j]);
}
IN void rows_of_blocks(const Job *job, int64_t from, int64_t to, const int eight, const int scales) {
  const int64_t rows = job->rows;
  int64_t o = from;
  if (job->runs && rows == 1) { /* with more rows one stream is as fast */
    const int64_t apart = (to - from) / (16 * C) * 16;
    for (; o < from + apart; o += 16) tile_blocks(job, 0, o, apart, C, eight, scales, 1);
    o = from + C * apart;
  }
  for (; o < to; o += 16) {
    int64_t row = 0;
    EACH_TILE(row, rows, TALL, tile_blocks, job, row, o, 0, 1, eight, scales)
  }
}
IN void blocks_as(const Job *job, int64_t from, int64_t to, const int scales) {
  if (job->w->form == BLOCKS8) rows_of_blocks(job, from, to, 1, scales);
  else rows_of_blocks(job, from, to, 0, scales);
}
void blocks(const Job *job, int64_t from, int64_t to) {
  if (is_tiled(job)) outputs_amx_blocks(job, from, to);
  else if (job->w->type == HALVES) blocks_as(job, from, to, HALVES);
  else if (job->w->type == RANGES) blocks_as(job, from, to, RANGES);
  else if (job->w->form == BLOCKS8) rows_of_blocks(job, from, to, 1, SIXTEENS);
  else rows_of_blocks(job, from, to, 0, SHORTS);
}

/* A row of x: codes; of each 32 their scale, and their sum times it; and what the sum of a block, or of half a block, begins with. */
void code_blocks(void *p, int row) {
  const Job *job = p;
  const int64_t groups = job->w->in / 32;
  const int eight = job->w->form == BLOCKS8, scales = job->w->type, by = unsigned_by(eight, scales);
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
