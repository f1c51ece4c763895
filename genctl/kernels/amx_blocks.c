/* Many rows of blocks by the CPU's tiles (AMX): the exact sums of blocks.c, and the same operations after them.

   A tile of W is a block of 16 outputs, [8 fours of inputs, 16 outputs, 4], as it lies, or unpacked from 4 bits; one of x is a
   block of 16 rows, as it lies. So a tile of sums is [16 rows, 16 outputs], and is added to sums in registers. */
#ifdef __AMX_BF16__
#include "amx.h"

#define WAITING 262144 /* bytes of outputs that are unpacked while all rows pass */

IN void unpack(const uint8_t *w, int8_t *to, int64_t groups, const int bits, int least) { /* code 0 is `least` */
  for (int64_t g = 0; g < groups; g++, w += 64 * bits, to += 512) UNROLL for (int q = 0; q < 8; q++) {
    if (q < bits) __builtin_prefetch(w + 64 * q + 6144, 0, 2);
    _mm512_storeu_si512(to + 64 * q, _mm512_add_epi8(codes_of(w, q, bits), _mm512_set1_epi8((char)least)));
  }
}
/* 16 outputs, whose codes are `w`, of 16 rows, of which those behind the last are not written */
IN void multiply(const Job *job, int64_t row, int64_t o, const int8_t *w, const float *scale, const int scales) {
  const int64_t width = job->width, groups = job->w->in / 32;
  const int parts = scales == SIXTEENS ? 2 : 1; /* of a block, which have a scale each */
  const float *x_scale = job->largest + row * 2 * groups;
  const int8_t *x = job->codes + row * width;
  int32_t sums[2][256] __attribute__((aligned(64)));
  F s[16];
  UNROLL for (int i = 0; i < 16; i++) s[i] = all(0);
  for (int64_t g = 0; g < groups; g++, x += 32, w += 512, x_scale += 32, scale += 32) {
    UNROLL for (int part = 0; part < parts; part++) {
      _tile_zero(0);
      _tile_loadd(6, x + 16 * part, width);
      _tile_loadd(7, w + 256 * part, 64);
      _tile_dpbssd(0, 6, 7);
      _tile_stored(0, sums[part], 64);
    }
    UNROLL for (int i = 0; i < 16; i++) {
      UNROLL for (int part = 0; part < parts; part++)
        s[i] = fma16(real(ldc(sums[part] + 16 * i)), mul(ld(scale + 16 * part), all(x_scale[i])), s[i]);
      if (scales == RANGES) s[i] = fma16(ld(scale + 16), all(x_scale[16 + i]), s[i]);
    }
  }
  UNROLL for (int i = 0; i < 16; i++)
    if (row + i < job->rows) put16(job, row + i, o, job->w->out - o, s[i]);
}
void outputs_amx_blocks(const Job *job, int64_t from, int64_t to) {
  const int64_t in = job->w->in, some = WAITING / (16 * in) * 16, width = some < 16 ? 16 : some;
  const int bits = job->w->form, scales = job->w->type, least = -middle(job->w);
  float *wide = scratch(4, sizeof(float) * (size_t)(width * in / 16) + (size_t)(bits == 8 ? 0 : width * in));
  int8_t *codes = (int8_t *)(wide + width * in / 16);
  use_tiles(scales == SIXTEENS ? 16 : 32);
  for (int64_t begin = from, end; begin < to; begin = end) {
    end = begin + width < to ? begin + width : to;
    const int8_t *w = bits == 8 ? (const int8_t *)job->w->w + begin * in : codes;
    const uint8_t *packed = (const uint8_t *)job->w->w + begin * in * bits / 8;
    const int64_t count = (end - begin + 15) / 16 * in / 32;
    if (bits == 4) unpack(packed, codes, count, 4, least);
    else if (bits == 5) unpack(packed, codes, count, 5, least);
    else if (bits == 6) unpack(packed, codes, count, 6, least);
    for (int64_t o = begin; o < end; o += 16) widen_scales(job->w, o, wide + (o - begin) * in / 16);
    for (int64_t row = 0; row < job->rows; row += 16)
      for (int64_t o = begin; o < end; o += 16) {
        const int8_t *at = w + (o - begin) * in;
        const float *scale = wide + (o - begin) * in / 16;
        if (scales == HALVES) multiply(job, row, o, at, scale, HALVES);
        else if (scales == SIXTEENS) multiply(job, row, o, at, scale, SIXTEENS);
        else multiply(job, row, o, at, scale, RANGES);
      }
  }
  _tile_release();
}
#endif
