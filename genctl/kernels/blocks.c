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
/* Of block g of 16 outputs the scale, and the offset or the scale of its second half. `sixes`: numbers of 6 bits, which are unpacked
   for eight blocks in turn. */
IN void scales_of(const Weight *w, int64_t o, int64_t g, const int scales, F *to, int8_t *sixes) {
  const int size = scales == HALVES ? 32 : scales == SIXES ? 256 : scales == SIXTEENS ? 288 : 64, blocks = size > 64 ? 8 : 1;
  const uint8_t *at = (const uint8_t *)w->range + (o / 16 * (w->in / 32) + g) / blocks * size;
  const uint16_t *h = (const uint16_t *)at + (scales == SIXES ? 32 : scales == SIXTEENS ? 128 : 0);
  const int8_t *factors = (scales == SIXES ? sixes : (const int8_t *)at) + g % 8 * 32;
  to[0] = scales == SHORTS ? ldb(h) : ldh(h);
  to[1] = scales == SHORTS ? ldb(h + 16) : scales == RANGES || scales == SIXES ? ldh(h + 16) : to[0];
  if (scales == SIXES && g % 8 == 0) UNROLL for (int q = 0; q < 4; q++) {
    const B unpacked = codes_of(at, q, 6);
    memcpy(sixes + 64 * q, &unpacked, 64);
  }
  if (blocks == 8) UNROLL for (int k = 0; k < 2; k++) to[k] = mul(to[k], real(ldi(factors + 16 * k)));
}
void widen_scales(const Weight *w, int64_t o, float *y) {
  int8_t sixes[256];
  F scale[2];
  for (int64_t g = 0; g < w->in / 32; g++, y += 32) scales_of(w, o, g, w->type, scale, sixes), st(y, scale[0]), st(y + 16, scale[1]);
}

/* r rows by c times 16 outputs, which are `apart` from each other. `wide`: scales that `widen_scales` has made, or NULL if they are
   read as they lie. */
IN void tile_blocks(const Job *job, int64_t row, int64_t o, int64_t apart, const float *wide, const int is_wide, const int c, const int bits, const int scales, const int r) {
  const int64_t in = job->w->in, width = job->width, groups = in / 32, line = apart * in * bits / 8;
  const int part = scales == SIXTEENS ? 4 : 8;          /* steps that share a scale */
  const int few = IN_PAIRS ? 8 >> (bits - 4) : part;    /* steps whose sums are widened at once */
  const uint8_t *w = (const uint8_t *)job->w->w + o * in * bits / 8;
  const float *x_scale = job->largest + row * 2 * groups;
  const int8_t *x = job->codes + row * width;
  const int32_t *begin = job->total + row * 2 * groups;
  int8_t sixes[C][256] __attribute__((aligned(64)));
  F s[TALL][C], scale[C][2];
  EACH_SUM(r, 0, c) s[i][j] = all(0);
  for (int64_t g = 0; g < groups; g++, w += 64 * bits, x += 32, x_scale += 2, begin += 2) {
    if (!is_wide) UNROLL for (int j = 0; j < c; j++) scales_of(job->w, o + j * apart, g, scales, scale[j], sixes[j]);
    I sum[TALL][C], whole[TALL][C];
    DEEP for (int q = 0; q < 8; q++) {
      if (q % few == 0) EACH_SUM(r, 0, c) sum[i][j] = iall(IN_PAIRS ? 0 : begin[i * 2 * groups + q / part]);
      B codes[C];
      UNROLL for (int j = 0; j < c; j++) {
        const uint8_t *at = w + j * line;
        if (bits == 8 || q < bits) {
          if (c > 1) __builtin_prefetch(at + 64 * q + AHEAD_IN_RUNS(r), 0, 3);
          else __builtin_prefetch(at + 64 * q + 6144, 0, 2);
        }
        codes[j] = bits == 8 ? shifted(ldc(at + 64 * q)) : codes_of(at, q, bits);
      }
      UNROLL for (int i = 0; i < r; i++) {
        const B u = four(x + i * width + 4 * q);
        UNROLL for (int j = 0; j < c; j++)
          sum[i][j] = bits == 8 ? dots(sum[i][j], codes[j], u) : IN_PAIRS ? pairs(sum[i][j], codes[j], u) : dotu(sum[i][j], codes[j], u);
      }
      if ((q + 1) % few == 0) EACH_SUM(r, 0, c) {
        whole[i][j] = !IN_PAIRS ? sum[i][j] : iadd(wider(sum[i][j]), q % part < few ? iall(begin[i * 2 * groups + q / part]) : whole[i][j]);
        if ((q + 1) % part == 0) s[i][j] = fma16(real(whole[i][j]), mul(is_wide ? ld(wide + 32 * g + q / part * 16) : scale[j][q / part], all(x_scale[i * groups * 2])), s[i][j]);
      }
    }
    if (scales != HALVES && scales != SIXTEENS) EACH_SUM(r, 0, c)
      s[i][j] = fma16(is_wide ? ld(wide + 32 * g + 16) : scale[j][1], all(x_scale[i * groups * 2 + 1]), s[i][j]);
  }
  EACH_SUM(r, 0, c) put16(job, row + i, o + j * apart, job->w->out - o - j * apart, s[i][j]);
}
IN void one_of_blocks(const Job *job, int64_t from, int64_t to, const int bits, const int scales) {
  int64_t o = from;
  if (job->runs) { /* with more rows one stream is as fast */
    const int64_t apart = (to - from) / (16 * C) * 16;
    for (; o < from + apart; o += 16) tile_blocks(job, 0, o, apart, NULL, 0, C, bits, scales, 1);
    o = from + C * apart;
  }
  for (; o < to; o += 16) tile_blocks(job, 0, o, 0, NULL, 0, 1, bits, scales, 1);
}
IN void rows_of_blocks(const Job *job, int64_t from, int64_t to, const int bits, const int scales) {
  float *wide = scratch(4, sizeof(float) * (size_t)job->w->in);
  for (int64_t o = from, row = 0; o < to; o += 16, row = 0) {
    widen_scales(job->w, o, wide);
    EACH_TILE(row, job->rows, TALL, tile_blocks, job, row, o, 0, wide, 1, 1, bits, scales)
  }
}
#if defined(__AVX2__) || defined(__aarch64__)
#define KIND(how, b, s) if (bits == b && scales == s) { how(job, from, to, b, s); return; }
#else
#define KIND(how, b, s) { how(job, from, to, bits, scales); return; } /* in plain C each takes seconds to compile */
#endif
void blocks(const Job *job, int64_t from, int64_t to) {
  const int bits = job->w->form, type = job->w->type, one = job->rows == 1;
  const int scales = one || type == HALVES || type == SIXTEENS ? type : RANGES; /* once they are wide, all that have an offset are alike */
  if (is_tiled(job)) outputs_amx_blocks(job, from, to);
  else if (one) {
    KIND(one_of_blocks, 8, HALVES) KIND(one_of_blocks, 6, SIXTEENS)
    KIND(one_of_blocks, 5, HALVES) KIND(one_of_blocks, 5, RANGES) KIND(one_of_blocks, 5, SIXES)
    KIND(one_of_blocks, 4, HALVES) KIND(one_of_blocks, 4, RANGES) KIND(one_of_blocks, 4, SHORTS) KIND(one_of_blocks, 4, SIXES)
  } else {
    KIND(rows_of_blocks, 8, HALVES) KIND(rows_of_blocks, 6, SIXTEENS)
    KIND(rows_of_blocks, 5, HALVES) KIND(rows_of_blocks, 5, RANGES)
    KIND(rows_of_blocks, 4, HALVES) KIND(rows_of_blocks, 4, RANGES)
  }
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
