/* Many rows by outputs that are transposed, so that lanes are outputs (transposed.c, bfloat16_transposed.c) */
#pragma once
#include "job.h"

#define COLUMNS (R == TALL ? C : C / 2) /* vectors of outputs in registers, by TALL rows */
#define GROUP 258 /* rows, whose sums stay in the second cache: tiles of any height */
#if defined(__AVX2__) && !defined(__AVX512F__)
#define LEAST 24
#else
#define LEAST 97
#endif
IN int may_transpose(const Job *job) { return job->rows >= LEAST && job->w->in >= 256; } /* the same for all products of this x */

/* Tiles ask for their share of the weights that this thread transposes next, so that memory is not idle while they compute. */
typedef struct {
  const char *at, *end;
  int64_t share;
} Asked;
IN Asked ask_after(const Job *job, int64_t o, int64_t from, int64_t to, int64_t stride, int64_t tiles) {
  const int64_t next = o + 16 * COLUMNS < to ? o + 16 * COLUMNS : from + job->threads * job->block, rest = job->w->out - next;
  const int64_t bytes = rest > 16 * COLUMNS ? 16 * COLUMNS * stride : rest > 0 ? rest * stride : 0;
  const char *at = (const char *)job->w->w + next * stride;
  return (Asked){at, at + bytes, (bytes / tiles + 64) & ~(int64_t)63};
}
IN void ask_share(Asked *a) {
  for (const char *stop = a->at + a->share; a->at < stop && a->at < a->end; a->at += 64) __builtin_prefetch(a->at, 0, 2);
}

/* A piece that packs a tile of rows of x */
#define PACK_TILE(pack) \
  static void pack##_tile(void *p, int number) { \
    const Job *job = p; \
    const int64_t row = (int64_t)number * TALL; \
    NEXT_TILE(job->rows - row, TALL, pack, job, row) \
  }

/* [16, 16] numbers */
#if defined(__AVX512F__)
IN void transpose16(const F *v, F *y) {
  F p[16], q[16];
  UNROLL for (int i = 0; i < 16; i += 2) p[i] = _mm512_unpacklo_ps(v[i], v[i + 1]), p[i + 1] = _mm512_unpackhi_ps(v[i], v[i + 1]);
  UNROLL for (int i = 0; i < 16; i += 4) UNROLL for (int j = 0; j < 2; j++) { /* of four rows: columns 2 j and 2 j + 1 of each four */
    const __m512d a = _mm512_castps_pd(p[i + j]), b = _mm512_castps_pd(p[i + j + 2]);
    q[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), q[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
  }
  UNROLL for (int i = 0; i < 4; i++) UNROLL for (int j = 0; j < 16; j += 8) { /* of eight rows: columns i and i + 8, i + 4 and i + 12 */
    p[i + j] = _mm512_shuffle_f32x4(q[i + j], q[i + j + 4], 0x88);
    p[i + j + 4] = _mm512_shuffle_f32x4(q[i + j], q[i + j + 4], 0xdd);
  }
  UNROLL for (int i = 0; i < 8; i++) y[i] = _mm512_shuffle_f32x4(p[i], p[i + 8], 0x88), y[i + 8] = _mm512_shuffle_f32x4(p[i], p[i + 8], 0xdd);
}
#elif defined(__AVX2__)
IN void transpose8(const __m256 *v, __m256 *y) {
  __m256 p[8], q[8];
  UNROLL for (int i = 0; i < 8; i += 2) p[i] = _mm256_unpacklo_ps(v[i], v[i + 1]), p[i + 1] = _mm256_unpackhi_ps(v[i], v[i + 1]);
  UNROLL for (int i = 0; i < 8; i += 4) UNROLL for (int j = 0; j < 2; j++) {
    const __m256d a = _mm256_castps_pd(p[i + j]), b = _mm256_castps_pd(p[i + j + 2]);
    q[i + 2 * j] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, b)), q[i + 2 * j + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, b));
  }
  UNROLL for (int i = 0; i < 4; i++) y[i] = _mm256_permute2f128_ps(q[i], q[i + 4], 0x20), y[i + 4] = _mm256_permute2f128_ps(q[i], q[i + 4], 0x31);
}
IN void transpose16(const F *v, F *y) {
  __m256 part[8], transposed[8];
  UNROLL for (int i = 0; i < 16; i += 8) UNROLL for (int j = 0; j < 16; j += 8) { /* rows from i on, columns from j on */
    UNROLL for (int n = 0; n < 8; n++) part[n] = j ? v[i + n].b : v[i + n].a;
    transpose8(part, transposed);
    UNROLL for (int n = 0; n < 8; n++) *(i ? &y[j + n].b : &y[j + n].a) = transposed[n];
  }
}
#else
IN void transpose16(const F *v, F *y) {
  float rows[16][16], column[16];
  for (int i = 0; i < 16; i++) st(rows[i], v[i]);
  for (int l = 0; l < 16; l++) {
    for (int i = 0; i < 16; i++) column[i] = rows[i][l];
    y[l] = ld(column);
  }
}
#endif
