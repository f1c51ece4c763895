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
#define wider(sum) sum
#endif
void scales_of(const Weight *w, int64_t o, int64_t from, int64_t to, float *y) {
  const int type = w->type, size = type == HALVES ? 32 : type == SIXES ? 256 : type == SIXTEENS ? 288 : 64, blocks = size > 64 ? 8 : 1;
  const uint8_t *at = (const uint8_t *)w->range + (o / 16 * (w->in / 32) + from) / blocks * size;
  int8_t unpacked[256];
  for (int64_t g = from; g < to; g += blocks, at += size, y += 32 * blocks) {
    const uint16_t *h = (const uint16_t *)at;
    const int8_t *factors = type == SIXES ? unpacked : (const int8_t *)at;
    if (type == HALVES) st(y, ldh(h));
    else if (blocks == 1) UNROLL for (int k = 0; k < 32; k += 16) st(y + k, type == SHORTS ? ldb(h + k) : ldh(h + k));
    if (type == SIXES) for (int q = 0; q < 4; q++) {
      const B codes = codes_of(at, q, 6);
      memcpy(unpacked + 64 * q, &codes, 64);
    }
    if (blocks == 8) for (int k = 0; k < 256; k += 16) st(y + k, mul(ldh(h + (type == SIXTEENS ? 128 : 32 + k % 32)), real(ldi(factors + k))));
  }
}

/* r rows by c times 16 outputs, which are `apart` from each other. Scales are HALVES, RANGES, for all that have an offset, or
   SIXTEENS; `wide` are those of 16 outputs, or NULL. */
IN void tile_blocks(const Job *job, int64_t row, int64_t o, int64_t apart, const float *wide, const int c, const int bits, const int scales, const int r) {
  const int64_t in = job->w->in, width = job->width, groups = in / 32, line = apart * in * bits / 8;
  const int part = scales == SIXTEENS ? 4 : 8;          /* steps that share a scale */
  const int few = IN_PAIRS ? 8 >> (bits - 4) : part;    /* steps whose sums are widened at once */
  const uint8_t *w = (const uint8_t *)job->w->w + o * in * bits / 8;
  const float *x_scale = job->largest + row * 2 * groups;
  const int8_t *x = job->codes + row * width;
  const int32_t *begin = job->total + row * 2 * groups;
  float some[C][256];
  F s[TALL][C];
  UNROLL for (int i = 0; i < r; i++) UNROLL for (int j = 0; j < c; j++) s[i][j] = all(0);
  for (int64_t g = 0; g < groups; g++, w += 64 * bits, x += 32, x_scale += 2, begin += 2) {
    if (!wide && g % 8 == 0) UNROLL for (int j = 0; j < c; j++) scales_of(job->w, o + j * apart, g, g + 8 < groups ? g + 8 : groups, some[j]);
    const float *scale = wide ? wide + 32 * g : some[0] + g % 8 * 32;
    I sum[TALL][C], whole[TALL][C];
    DEEP for (int q = 0; q < 8; q++) {
      if (q % few == 0) UNROLL for (int i = 0; i < r; i++) UNROLL for (int j = 0; j < c; j++) sum[i][j] = iall(IN_PAIRS ? 0 : begin[i * 2 * groups + q / part]);
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
        whole[i][j] = !IN_PAIRS ? sum[i][j] : iadd(wider(sum[i][j]), q % part < few ? iall(begin[i * 2 * groups + q / part]) : whole[i][j]);
        if ((q + 1) % part == 0) s[i][j] = fma16(real(whole[i][j]), mul(ld(scale + 256 * j + q / part * 16), all(x_scale[i * groups * 2])), s[i][j]);
      }
    }
    if (scales == RANGES) UNROLL for (int i = 0; i < r; i++) UNROLL for (int j = 0; j < c; j++)
      s[i][j] = fma16(ld(scale + 256 * j + 16), all(x_scale[i * groups * 2 + 1]), s[i][j]);
  }
  UNROLL for (int i = 0; i < r; i++) UNROLL for (int j = 0; j < c; j++) put16(job, row + i, o + j * apart, job->w->out - o - j * apart, s[i][j]);
}
IN void rows_of_blocks(const Job *job, int64_t from, int64_t to, const int bits, const int scales) {
  const int64_t rows = job->rows, groups = job->w->in / 32;
  float *wide = rows > TALL ? scratch(4, sizeof(float) * (size_t)(32 * groups)) : NULL; /* for several tiles */
  int64_t o = from;
  if (job->runs && rows == 1) { /* with more rows one stream is as fast */
    const int64_t apart = (to - from) / (16 * C) * 16;
    for (; o < from + apart; o += 16) tile_blocks(job, 0, o, apart, NULL, C, bits, scales, 1);
    o = from + C * apart;
  }
  for (; o < to; o += 16) {
    int64_t row = 0;
    if (wide) scales_of(job->w, o, 0, groups, wide);
    EACH_TILE(row, rows, TALL, tile_blocks, job, row, o, 0, wide, 1, bits, scales)
  }
}
#define KIND(b, s) if (bits == b && scales == s) rows_of_blocks(job, from, to, b, s)
void blocks(const Job *job, int64_t from, int64_t to) {
  const int bits = job->w->form, scales = job->w->type == HALVES || job->w->type == SIXTEENS ? job->w->type : RANGES;
  if (is_tiled(job)) outputs_amx_blocks(job, from, to);
#if defined(__AVX2__) || defined(__aarch64__)
  else KIND(8, HALVES); else KIND(6, SIXTEENS);
  else KIND(5, HALVES); else KIND(5, RANGES);
  else KIND(4, HALVES); else KIND(4, RANGES);
#else /* in plain C each would take seconds to compile */
  else rows_of_blocks(job, from, to, bits, scales);
#endif
}

/* A row of x: codes; of each 32 their scale, and their sum times it; and what the sum of a block, or of half a block, begins with. */
void code_blocks(void *p, int row) {
  const Job *job = p;
  const int64_t groups = job->w->in / 32;
  const int scales = job->w->type, by = job->w->form == BLOCKS8 ? SHIFT : middle(job->w); /* which makes codes unsigned */
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
