/* Weights of 8 bits, a scale for each output: sums of integers are exact (with AMX see amx_codes.c). And rows of x as codes of 8
   bits, for these and for blocks. */
#include "amx.h"
#include "dots.h"
#include "tiles.h"

IN float scaled8(const Job *job, int64_t row, int64_t o, int32_t sum) { /* the scale has the 1 / 127 of the row in it */
  return (float)(sum - SHIFT * job->total[row]) * job->w->scale[o] * job->largest[row];
}
IN void put8(const Job *job, int64_t row, int64_t o, int64_t apart, const int32_t *sums, const int c) { /* of four, or fewer */
  float v[4];
  for (int j = 0; j < c; j++) v[j] = scaled8(job, row, o + j * apart, sums[j]);
  if (c == 4) put4(job, row, o, apart, v);
  else for (int j = 0; j < c; j++) put(job, row, o + j * apart, v[j]);
}
IN void tile8(const Job *job, int64_t row, int64_t o, int64_t apart, const int r, const int c, const Next next) {
  const int64_t in = job->w->in, line = apart * in, width = job->width;
  const char *w = (const char *)job->w->w + o * in;
  const int8_t *x = job->codes + row * width;
  I s[TALL][C];
  B v[C];
  EACH_SUM(r, 0, c) s[i][j] = iall(0);
  int64_t k = 0;
  for (; k + 64 <= in; k += 64) {
    UNROLL for (int j = 0; j < c; j++) {
      if (c == 1 && job->rows > TALL) __builtin_prefetch(w + k + 2048, 0, 3); /* later rows read it from the second cache */
      else ASK(k / 64, j);
      v[j] = shifted(ldc(w + j * line + k));
    }
    UNROLL for (int i = 0; i < r; i++) {
      B u = ldc(x + i * width + k);
      UNROLL for (int j = 0; j < c; j++) s[i][j] = dots(s[i][j], v[j], u);
    }
  }
  if (k < in) {
    UNROLL for (int j = 0; j < c; j++) v[j] = shifted(ldcn(w + j * line + k, (int)(in - k)));
    UNROLL for (int i = 0; i < r; i++) {
      B u = ldc(x + i * width + k);
      UNROLL for (int j = 0; j < c; j++) s[i][j] = dots(s[i][j], v[j], u);
    }
  }
  if (c == 1) {
    UNROLL for (int i = 0; i < r; i += 4) {
      int32_t y[4];
      itree4(s[i][0], s[i + 1 < r ? i + 1 : i][0], s[i + 2 < r ? i + 2 : i][0], s[i + 3 < r ? i + 3 : i][0], y);
      UNROLL for (int l = 0; l < 4 && i + l < r; l++) put8(job, row + i + l, o, 1, y + l, 1);
    }
  } else UNROLL for (int i = 0; i < r; i++) {
    int32_t y[4];
    itree4(s[i][0], s[i][1 % c], s[i][2 % c], s[i][3 % c], y);
    put8(job, row + i, o, apart, y, c);
  }
}
static __attribute__((noinline)) void single8(const Job *job, int64_t row, int64_t o) { tile8(job, row, o, 1, 1, 1, (Next){0}); }
#define TILE8_SINGLE(row, o) single8(job, row, o)
#define TILE8(row, o, apart, r, c, next) tile8(job, row, o, apart, r, c, next)
/* One row: W is read in runs, or from begin to end; the lanes of four outputs are added up together. */
IN void one8(const Job *job, int64_t from, int64_t to, const int runs) {
  const int64_t in = job->w->in, tiles = (to - from) / 4, apart = runs ? tiles : 1, line = apart * in;
  const int8_t *x = job->codes;
  for (int64_t n = 0; n < tiles; n++) {
    const int64_t o = from + n * (runs ? 1 : 4);
    const char *w = (const char *)job->w->w + o * in;
    I s[4];
    int64_t k = 0;
    UNROLL for (int j = 0; j < 4; j++) s[j] = iall(0);
    if (runs) for (; k + 64 <= in; k += 64) {
      const B u = ldc(x + k);
      UNROLL for (int j = 0; j < 4; j++) {
        __builtin_prefetch(w + j * line + k + AHEAD_IN_RUNS(1), 0, 3);
        s[j] = dots(s[j], shifted(ldc(w + j * line + k)), u);
      }
    } else UNROLL for (int j = 0; j < 4; j++) {
      for (k = 0; k + 64 <= in; k += 64) {
        __builtin_prefetch(w + j * line + k + 12288, 0, 2);
        s[j] = dots(s[j], shifted(ldc(w + j * line + k)), ldc(x + k));
      }
    }
    if (k < in) UNROLL for (int j = 0; j < 4; j++) s[j] = dots(s[j], shifted(ldcn(w + j * line + k, (int)(in - k))), ldc(x + k));
    int32_t y[4];
    itree4(s[0], s[1], s[2], s[3], y);
    put8(job, 0, o, apart, y, 4);
  }
  for (int64_t o = from + 4 * tiles; o < to; o++) single8(job, 0, o);
}
void codes8(const Job *job, int64_t from, int64_t to) {
  if (HAS_AMX && job->rows >= AMX_CODES) outputs_amx_codes(job, from, to);
  else if (job->rows == 1 && job->runs) one8(job, from, to, 1);
  else if (job->rows == 1) one8(job, from, to, 0);
  else ALL_ROWS(TILE8, job->w->in)
}

/* -- rows of x ------------------------------------------------------------------------------------------------------ */

/* Codes of numbers [k, stop) by their largest one, which is NaN where one is not finite; returns the sum of codes. */
int32_t coded(const Job *job, int64_t row, int64_t k, int64_t stop, float *most_of_all, int8_t *to) {
  I top = iall(0), sum = iall(0);
  for (int64_t at = k; at < stop; at += 16) top = imax(top, bits(absolute(row_part(job, row, at))));
  const int32_t m = largest(top);
  const float greatest = as_float((uint32_t)m);
  if (m >= 0x7f800000) {
    memset(to, 0, (size_t)(stop - k));
    *most_of_all = NAN;
    return 0;
  }
  *most_of_all = greatest;
  const F inverse = all(127.0f / greatest);
  const int nothing = greatest == 0 || 127.0f / greatest > 3e38f; /* 0, or too small to be scaled up: no code at all */
  for (int64_t at = k; at < stop; at += 16) {
    I q = nothing ? iall(0) : whole(mul(row_part(job, row, at), inverse));
    sum = iadd(sum, q);
    stb(to + at - k, q);
  }
  int32_t s[4];
  itree4(sum, iall(0), iall(0), iall(0), s);
  return s[0];
}
void code8(void *p, int row) {
  const Job *job = p;
  ((int32_t *)job->total)[row] = coded(job, row, 0, job->width, (float *)job->largest + row, (int8_t *)job->codes + row * job->width);
}
