/* y [N, O] = x [N, I] W' + bias, for any number of rows N.

   Each output is summed by one thread in an order that the sizes alone decide: a row has the same bits alone and among
   others, with one thread and with many, and in float32 sums on every instruction set.
     [O, I]: lane l adds up the inputs k = l mod 16, in turn; then the tree of lanes.h.
     [I, O]: see across.c. bfloat16: see bfloat16.c and bfloat16_across.c.
     8 bits: sums of integers are exact. With AMX see amx_codes.c.
     4 bits: of each group of 32, lane l adds up four exact products at a time; then as above.
     Blocks (blocks.c): lane l is an output.
   A tile of TALL rows by OUTPUTS keeps its sums in registers, and reads W and x as they lie: nothing is packed. */
#include "job.h"

/* What is read next: 2 KB ahead where one output streams, else a share of the next strip. */
#define ASK(line, j, c) \
  if ((c) == 1) __builtin_prefetch(w + (line) * 64 + 2048, 0, 3); \
  else if ((j) < next.lines) __builtin_prefetch(next.at + ((line) * next.lines + (j)) * 64, 0, 2)

/* -- [O, I] -------------------------------------------------------------------------------------------------------- */

IN void tile(const Job *job, const int type, int64_t row, int64_t o, const int r, const int c, const Next next) {
  const int64_t in = job->w->in, stride = in * (type == F32 ? 4 : 2);
  const char *w = (const char *)job->w->w + o * stride;
  const float *x = job->x + row * in;
  F s[TALL][C], v[C];
  UNROLL for (int i = 0; i < r; i++) UNROLL for (int j = 0; j < c; j++) s[i][j] = all(0);
  int64_t k = 0;
  for (; k + 16 <= in; k += 16) {
    UNROLL for (int j = 0; j < c; j++) {
      if (type == F32 || !(k & 16)) {
        ASK(type == F32 ? k / 16 : k / 32, j, c);
      }
      v[j] = load(w + j * stride, k, type);
    }
    UNROLL for (int i = 0; i < r; i++) {
      F u = ld(x + i * in + k);
      UNROLL for (int j = 0; j < c; j++) s[i][j] = fma16(u, v[j], s[i][j]);
    }
  }
  if (k < in) {
    UNROLL for (int j = 0; j < c; j++) v[j] = loadn(w + j * stride, k, type, (int)(in - k));
    UNROLL for (int i = 0; i < r; i++) {
      F u = ldn(x + i * in + k, (int)(in - k));
      UNROLL for (int j = 0; j < c; j++) s[i][j] = fma16(u, v[j], s[i][j]);
    }
  }
  UNROLL for (int i = 0; i < r; i++) {
    if (c == 4) {
      float y[4];
      tree4(s[i][0], s[i][1 % C], s[i][2 % C], s[i][3 % C], y);
      UNROLL for (int j = 0; j < 4; j++) put(job, row + i, o + j, y[j]);
    } else UNROLL for (int j = 0; j < c; j++) put(job, row + i, o + j, tree(s[i][j]));
  }
}

/* Strips of outputs, whose weights stay in the second cache while the tiles of all rows pass. `after`: what this thread reads
   after these outputs. */
#define ROWS(call, r, c) \
  { \
    Next next = share_of(strip, (end - begin) * stride, pass++, passes); \
    int64_t o = begin; \
    for (; o + (c) <= end; o += (c), next.at += next.lines * stride) call(row, o, r, c, next); \
    for (; o < end; o++) \
      for (int q = 0; q < (r); q++) call(row + q, o, 1, 1, next); \
  }
#define STRIPS(call, a_stride) \
  { \
    const int64_t rows = job->rows, passes = (rows + TALL - 1) / TALL, stride = a_stride, width = strip_of(passes, stride); \
    const char *after = (const char *)job->w->w + (from + job->threads * job->block) * stride; \
    for (int64_t begin = from; begin < to; begin += width) { \
      const int64_t end = begin + width < to ? begin + width : to; \
      const char *strip = end < to ? (const char *)job->w->w + end * stride : after; \
      int64_t row = 0; \
      int pass = 0; \
      for (; row + TALL <= rows; row += TALL) ROWS(call, TALL, OUTPUTS) \
      switch (rows - row) { \
      case 5: ROWS(call, 5 < TALL ? 5 : TALL, OUTPUTS) break; \
      case 4: ROWS(call, 4 < TALL ? 4 : TALL, OUTPUTS) break; \
      case 3: ROWS(call, 3 < TALL ? 3 : TALL, OUTPUTS) break; \
      case 2: ROWS(call, 2 < TALL ? 2 : TALL, OUTPUTS) break; \
      case 1: ROWS(call, 1, OUTPUTS) break; \
      } \
    } \
  }
IN int64_t strip_of(int64_t passes, int64_t stride) {
  const int64_t some = 131072 / (stride ? stride : 1) / C * C;
  return OUTPUTS == 1 ? STRIP : passes == 1 ? 4 * C : some > STRIP ? STRIP : some < C ? C : some;
}
/* One row: four outputs, each a chain of its own. What is asked for ahead is the second four after them, line after line, so that
   memory sees one stream and not four. */
IN void one(const Job *job, const int type, int64_t from, int64_t to) {
  const int64_t in = job->w->in, stride = in * (type == F32 ? 4 : 2), step = type == F32 ? 16 : 32;
  const float *x = job->x;
  int64_t o = from;
  for (; o + 4 <= to; o += 4) {
    const char *w = (const char *)job->w->w + o * stride;
    F s[4];
    UNROLL for (int j = 0; j < 4; j++) s[j] = all(0);
    int64_t k = 0;
    for (; k + step <= in; k += step) {
      F u = ld(x + k), v = type == F32 ? u : ld(x + k + 16);
      UNROLL for (int j = 0; j < 4; j++) {
        __builtin_prefetch(w + 8 * stride + (k / step * 4 + j) * 64, 0, 2);
        s[j] = fma16(u, load(w + j * stride, k, type), s[j]);
        if (type != F32) s[j] = fma16(v, load(w + j * stride, k + 16, type), s[j]);
      }
    }
    for (; k < in; k += 16) {
      const int n = in - k < 16 ? (int)(in - k) : 16;
      F u = n == 16 ? ld(x + k) : ldn(x + k, n);
      UNROLL for (int j = 0; j < 4; j++) s[j] = fma16(u, n == 16 ? load(w + j * stride, k, type) : loadn(w + j * stride, k, type, n), s[j]);
    }
    float y[4];
    tree4(s[0], s[1], s[2], s[3], y);
    UNROLL for (int j = 0; j < 4; j++) put(job, 0, o + j, y[j]);
  }
  for (; o < to; o++) tile(job, type, 0, o, 1, 1, (Next){0});
}
#define F32_TILE(row, o, r, c, next) tile(job, F32, row, o, r, c, next)
#define F16_TILE(row, o, r, c, next) tile(job, F16, row, o, r, c, next)
static void plain_f32(const Job *job, int64_t from, int64_t to) {
  if (job->rows == 1) one(job, F32, from, to);
  else STRIPS(F32_TILE, job->w->in * 4)
}
static void plain_f16(const Job *job, int64_t from, int64_t to) {
  if (job->rows == 1) one(job, F16, from, to);
  else STRIPS(F16_TILE, job->w->in * 2)
}

/* -- 8 bits -------------------------------------------------------------------------------------------------------- */

IN void put8(const Job *job, int64_t row, int64_t o, int32_t sum) {
  const float v = (float)(sum - SHIFT * job->total[row]) * job->w->scale[o]; /* the scale has the 1 / 127 of the row in it */
  put(job, row, o, v * job->largest[row]);
}
IN void tile8(const Job *job, int64_t row, int64_t o, const int r, const int c, const Next next) {
  const int64_t in = job->w->in, width = job->width, stride = in;
  const char *w = (const char *)job->w->w + o * in;
  const int8_t *x = job->codes + row * width;
  I s[TALL][C];
  B v[C];
  UNROLL for (int i = 0; i < r; i++) UNROLL for (int j = 0; j < c; j++) s[i][j] = iall(0);
  int64_t k = 0;
  for (; k + 64 <= in; k += 64) {
    UNROLL for (int j = 0; j < c; j++) {
      ASK(k / 64, j, c);
      v[j] = shifted(ldc(w + j * in + k));
    }
    UNROLL for (int i = 0; i < r; i++) {
      B u = ldc(x + i * width + k);
      UNROLL for (int j = 0; j < c; j++) s[i][j] = dots(s[i][j], v[j], u);
    }
  }
  if (k < in) {
    UNROLL for (int j = 0; j < c; j++) v[j] = shifted(ldcn(w + j * in + k, (int)(in - k)));
    UNROLL for (int i = 0; i < r; i++) {
      B u = ldc(x + i * width + k);
      UNROLL for (int j = 0; j < c; j++) s[i][j] = dots(s[i][j], v[j], u);
    }
  }
  UNROLL for (int i = 0; i < r; i++) {
    int32_t y[4];
    itree4(s[i][0], s[i][1 % c], s[i][2 % c], s[i][3 % c], y);
    UNROLL for (int j = 0; j < c; j++) put8(job, row + i, o + j, y[j]);
  }
}
#define TILE8(row, o, r, c, next) tile8(job, row, o, r, c, next)
/* One row: W is read from begin to end; the lanes of four outputs are added up together. */
static void one8(const Job *job, int64_t from, int64_t to) {
  const int64_t in = job->w->in;
  const int8_t *x = job->codes;
  int64_t o = from;
  for (; o + 4 <= to; o += 4) {
    const char *w = (const char *)job->w->w + o * in;
    I s[4];
    UNROLL for (int j = 0; j < 4; j++, w += in) {
      s[j] = iall(0);
      int64_t k = 0;
      for (; k + 64 <= in; k += 64) {
        __builtin_prefetch(w + k + 12288, 0, 2);
        s[j] = dots(s[j], shifted(ldc(w + k)), ldc(x + k));
      }
      if (k < in) s[j] = dots(s[j], shifted(ldcn(w + k, (int)(in - k))), ldc(x + k));
    }
    int32_t y[4];
    itree4(s[0], s[1], s[2], s[3], y);
    UNROLL for (int j = 0; j < 4; j++) put8(job, 0, o + j, y[j]);
  }
  for (; o < to; o++) tile8(job, 0, o, 1, 1, (Next){0});
}
static void codes8(const Job *job, int64_t from, int64_t to) {
#ifdef __AMX_BF16__
  if (job->rows >= AMX_CODES) {
    outputs_amx_codes(job, from, to);
    return;
  }
#endif
  if (job->rows == 1) one8(job, from, to);
  else STRIPS(TILE8, job->w->in)
}

/* -- 4 bits -------------------------------------------------------------------------------------------------------- */

/* The sum of one output for r rows. Scales of 16 groups are made at once; two groups, 64 numbers, are one step. */
IN void sum4(const Job *job, int64_t row, int64_t o, const int r, F *s) {
  const int64_t width = job->width, groups = width / 32, pad = (groups + 15) & ~(int64_t)15;
  const uint8_t *w = (const uint8_t *)job->w->w + o * width / 2;
  const uint16_t *scale = job->w->range + o * 2 * groups, *zero = scale + groups;
  const int8_t *x = job->codes + row * width;
  const float *x_scale = job->largest + row * 2 * pad;
  F z[TALL];
  UNROLL for (int i = 0; i < r; i++) s[i] = z[i] = all(0);
  for (int64_t g = 0; g < groups; g += 16) {
    const int n = groups - g < 16 ? (int)(groups - g) : 16;
    F sc = n == 16 ? ldb(scale + g) : loadn(scale, g, BF16, n), ze = n == 16 ? ldb(zero + g) : loadn(zero, g, BF16, n);
    ze = fma16(all(-8.0f), sc, ze);
    Pairs both[TALL];
    UNROLL for (int i = 0; i < r; i++) {
      both[i] = pairs(mul(sc, ld(x_scale + i * 2 * pad + g)));
      z[i] = fma16(ze, ld(x_scale + i * 2 * pad + pad + g), z[i]);
    }
#define STEP4(p) { \
      const uint8_t *at = w + (g + (p)) * 16; \
      __builtin_prefetch(at + 2048, 0, 3); \
      B codes = nibbles(at); \
      UNROLL for (int i = 0; i < r; i++) s[i] = fma16(real(dotu(iall(0), codes, ldc(x + i * width + (g + (p)) * 32))), pair(both + i, p), s[i]); \
    }
    if (n == 16) {
      DEEP for (int p = 0; p < 16; p += 2) STEP4(p)
    } else {
      for (int p = 0; p < n; p += 2) STEP4(p)
    }
  }
  UNROLL for (int i = 0; i < r; i++) s[i] = add(s[i], z[i]);
}
IN void tile4(const Job *job, int64_t row, int64_t o, const int r) {
  F s[TALL];
  sum4(job, row, o, r, s);
  UNROLL for (int i = 0; i < r; i++) put(job, row + i, o, tree(s[i]));
}
/* One row: the lanes of four outputs are added up together. */
static void one4(const Job *job, int64_t from, int64_t to) {
  int64_t o = from;
  for (; o + 4 <= to; o += 4) {
    F s[4];
    float y[4];
    for (int j = 0; j < 4; j++) sum4(job, 0, o + j, 1, s + j);
    tree4(s[0], s[1], s[2], s[3], y);
    UNROLL for (int j = 0; j < 4; j++) put(job, 0, o + j, y[j]);
  }
  for (; o < to; o++) tile4(job, 0, o, 1);
}
#define TILE4(row, o, r, c, next) for (int output = 0; output < (c); output++) tile4(job, row, (o) + output, r)
static void codes4(const Job *job, int64_t from, int64_t to) {
  if (job->rows == 1) one4(job, from, to);
  else STRIPS(TILE4, job->width / 2)
}

static void outputs(void *p, int number) {
  const Job *job = p; /* products of the same x stand one after the other */
  for (; number >= job->pieces; job++) number -= job->pieces;
  const int64_t out = job->w->out, from = number * job->block, to = from + job->block < out ? from + job->block : out;
  switch (job->w->form) {
  case PLAIN:
    switch (job->w->type) {
    case F32: plain_f32(job, from, to); break;
    case BF16: plain_bf16(job, from, to); break;
    default: plain_f16(job, from, to);
    }
    break;
  case CODES8: codes8(job, from, to); break;
  case BLOCKS8: blocks8(job, from, to); break;
  case BLOCKS4: blocks4(job, from, to); break;
  default: codes4(job, from, to);
  }
}

/* -- rows in the form that a product reads -------------------------------------------------------------------------- */

static F row_part(const Job *job, int64_t row, int64_t k) {
  const int64_t in = job->w->in, n = in - k;
  return n >= 16 ? load(job->given, row * in + k, job->type) : n > 0 ? loadn(job->given, row * in + k, job->type, (int)n) : all(0);
}
static void widen(void *p, int number) {
  const Job *job = p;
  float *x = (float *)job->x + number * job->w->in;
  for (int64_t k = 0; k < job->w->in; k += 16) {
    const int64_t n = job->w->in - k;
    F v = row_part(job, number, k);
    if (n >= 16) st(x + k, v);
    else stn(x + k, v, (int)n);
  }
}
/* Codes of numbers [k, stop) by their largest one, which is NaN where one is not finite; returns the sum of codes. */
IN int32_t coded(const Job *job, int64_t row, int64_t k, int64_t stop, float *most_of_all, int8_t *to) {
  I top = iall(0), sum = iall(0);
  for (int64_t at = k; at < stop; at += 16) top = imax(top, bits(absolute(row_part(job, row, at))));
  const int32_t m = largest(top);
  float greatest;
  memcpy(&greatest, &m, 4);
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
static void code8(void *p, int row) {
  const Job *job = p;
  ((int32_t *)job->total)[row] = coded(job, row, 0, job->width, (float *)job->largest + row, (int8_t *)job->codes + row * job->width);
}
void code4(void *p, int row) {
  const Job *job = p;
  const int64_t groups = job->width / 32, pad = (groups + 15) & ~(int64_t)15;
  float *scale = (float *)job->largest + row * 2 * pad, *sums = scale + pad;
  memset(scale, 0, sizeof(float) * 2 * (size_t)pad);
  for (int64_t g = 0; g < groups; g++) {
    const int32_t sum = coded(job, row, 32 * g, 32 * g + 32, scale + g, (int8_t *)job->codes + row * job->width + 32 * g);
    scale[g] /= 127.0f;
    sums[g] = (float)sum * scale[g];
  }
}

/* x in the form that the product reads; others of the same form and width read the same. */
static void prepare(Job *job) {
  const Weight *w = job->w;
  const int64_t rows = job->rows;
  const int ready = rows * w->in > 1 << 15 ? job->threads : 1;
  if (w->form >= CODES8) {
    job->width = (w->in + 63) & ~(int64_t)63;
    const int64_t pad = (job->width / 32 + 15) & ~(int64_t)15;
    job->codes = scratch(0, (size_t)(rows * job->width));
    job->largest = scratch(1, sizeof(float) * (size_t)(w->form == CODES8 ? rows : rows * 2 * pad));
    job->total = scratch(2, sizeof(int32_t) * (size_t)(w->form >= BLOCKS8 ? rows * w->in / 16 : rows));
    pieces(w->form == CODES8 ? code8 : w->form == CODES4 ? code4 : code_blocks, job, (int)rows, ready);
#ifdef __AMX_BF16__
    if (w->form == CODES8 && rows >= AMX_CODES) prepare_amx_codes(job, ready);
#endif
  } else if (w->type == BF16) {
    if (w->form == PLAIN) prepare_bf16(job); /* else across_bf16 does */
  } else if (job->type == F32) {
    job->x = job->given;
  } else {
    job->x = scratch(0, sizeof(float) * (size_t)(rows * w->in));
    pieces(widen, job, (int)rows, ready);
  }
  if (w->form == ACROSS && w->type != BF16) lay_out_across(job, ready);
}
/* A piece is 128 KB of the weight, and strips. With one row, which no cache serves, it is 512 KB, and as many for each thread;
   and where several tiles of rows share strips, too, but each thread has six, since one may come late. */
static void cut(Job *job) {
  const Weight *w = job->w;
  const int eight = w->form == CODES8 || w->form == BLOCKS8, tiled = w->form == CODES8 && job->rows >= AMX_CODES;
  const int together = tiled ? 32 : w->form >= BLOCKS8 ? 16 : 4;
  const int64_t bytes = eight ? w->in : w->form >= CODES8 ? w->in / 2 + w->in / 8 : w->in * (w->type == F32 ? 4 : 2);
  int64_t block = (131072 / (bytes ? bytes : 1) + STRIP) / STRIP * STRIP;
  if (job->rows == 1 || tiled || (OUTPUTS > 1 && job->rows > TALL && w->form < CODES4)) {
    const int64_t each = w->out * bytes / job->threads, least = job->rows > 1 && each > 65536 ? 6 : 1;
    const int64_t rounds = (each + 524287) / 524288, count = job->threads * (rounds > least ? rounds : least);
    block = ((w->out + count - 1) / count + together - 1) / together * together;
  }
  const int64_t share = ((w->out + job->threads - 1) / job->threads + together - 1) / together * together;
  job->block = block < share ? block : share < together ? together : share;
  job->pieces = (int)((w->out + job->block - 1) / job->block);
}

void products(const Weight *const *w, int32_t count, const void *x, void *y, int64_t rows, int32_t type, int32_t threads) {
  Job jobs[MOST_PRODUCTS];
  int64_t first = 0, work = 0;
  int all_pieces = 0;
  if (rows <= 0 || count > MOST_PRODUCTS) return;
  for (int n = 0; n < count; n++) first += w[n]->out;
  const int64_t y_row = first;
  first = 0;
  for (int n = 0; n < count; n++) {
    jobs[n] = (Job){.w = w[n], .given = x, .y = y, .type = type, .threads = threads, .rows = rows, .first = first, .y_row = y_row};
    first += w[n]->out;
    work += w[n]->in * w[n]->out * rows;
    if (n == 0) prepare(jobs);
    else jobs[n].x = jobs->x, jobs[n].packed = jobs->packed, jobs[n].form = jobs->form, jobs[n].codes = jobs->codes, jobs[n].largest = jobs->largest, jobs[n].total = jobs->total, jobs[n].width = jobs->width;
    if (w[n]->form == ACROSS && w[n]->type == BF16) across_bf16(jobs + n);
    else if (w[n]->form == ACROSS) across(jobs + n);
    else cut(jobs + n), all_pieces += jobs[n].pieces;
  }
  if (all_pieces) pieces(outputs, jobs, all_pieces, work < 1 << 15 ? 1 : threads);
}
