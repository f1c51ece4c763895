/* y [N, O] = x [N, I] W' + bias, for any number of rows N.

   Each output is summed by one thread in an order that the sizes alone decide: a row has the same bits alone and among
   others, with one thread and with many, and in float32 sums on every instruction set.
     [O, I]: lane l adds up the inputs k = l mod 16, in turn; then the tree of lanes.h.
     [I, O]: the inputs are cut into at most PARTS parts; a part is one chain; the parts are added in turn.
     bfloat16: see bfloat16.c and bfloat16_across.c.
     8 bits: sums of integers are exact.
     4 bits: of each group of 32, lane l adds up four exact products at a time; then as above.
     Blocks (blocks.c): lane l is an output.
   A tile of TALL rows by OUTPUTS keeps its sums in registers, and reads W and x as they lie: nothing is packed. */
#include "job.h"

#define PARTS 8
/* Where the inputs lie outermost: */
/* FEW: rows up to which whole rows of a weight are read, and sums lie in the caches; more: tiles. Where registers hold few numbers,
   tiles gain little over this. SUMS: the most sums of a piece. */
#if defined(__AVX2__) && !defined(__AVX512F__)
#define FEW 20
#else
#define FEW 10
#endif
#define SUMS(rows) ((rows) > 8 ? 4096 : 8192)
#if defined(__AVX512F__)
#define INPUTS 8  /* whose weights are in registers while the few rows pass */
#else
#define INPUTS 4
#endif
#define BROAD 512 /* the most strips of a piece, times rows: sums stay in the second cache */
/* Inputs whose weights stay in the first cache while the tiles of all rows pass. Each may lie in another page: few, so that pages
   are not looked up again and again; but more where there is much to compute, and sums are moved less often. */
#define BLOCK 128
#define SHALLOW 32
#define DEEP_ROWS 17

/* What is read next: 2 KB ahead where one output streams; in a tile the fourth tile ahead, line after line into the second
   cache, so that memory sees one stream and not one for each output. */
#define AHEAD(line, lines, j, c) \
  ((c) == 1 ? __builtin_prefetch(w + (size_t)(line) * 64 + 2048, 0, 3) \
            : __builtin_prefetch(w + (size_t)4 * (c) * stride + ((size_t)(line) * (c) + (j)) * 64, 0, 2))

/* -- [O, I] -------------------------------------------------------------------------------------------------------- */

IN void tile(const Job *job, const int type, int64_t row, int64_t o, const int r, const int c) {
  const int64_t in = job->w->in, stride = in * (type == F32 ? 4 : 2);
  const char *w = (const char *)job->w->w + o * stride;
  const float *x = job->x + row * in;
  F s[TALL][C], v[C];
  UNROLL for (int i = 0; i < r; i++) UNROLL for (int j = 0; j < c; j++) s[i][j] = all(0);
  int64_t k = 0;
  for (; k + 16 <= in; k += 16) {
    UNROLL for (int j = 0; j < c; j++) {
      if (type == F32 || !(k & 16)) AHEAD(type == F32 ? k / 16 : k / 32, , j, c);
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

/* One output at a time where there is one row, so that W streams; else tiles, and smaller ones for the rows that remain. */
#define ROWS(call, r, c) \
  { \
    int64_t o = begin; \
    for (; o + (c) <= end; o += (c)) call(row, o, r, c); \
    for (; o < end; o++) \
      for (int q = 0; q < (r); q++) call(row + q, o, 1, 1); \
  }
#define STRIPS(call) \
  for (int64_t begin = from; begin < to; begin += STRIP) { \
    const int64_t end = begin + STRIP < to ? begin + STRIP : to, rows = job->rows; \
    int64_t row = 0; \
    for (; row + TALL <= rows; row += TALL) ROWS(call, TALL, OUTPUTS) \
    switch (rows - row) { \
    case 5: ROWS(call, 5 < TALL ? 5 : TALL, OUTPUTS) break; \
    case 4: ROWS(call, 4 < TALL ? 4 : TALL, OUTPUTS) break; \
    case 3: ROWS(call, 3 < TALL ? 3 : TALL, OUTPUTS) break; \
    case 2: ROWS(call, 2 < TALL ? 2 : TALL, OUTPUTS) break; \
    case 1: ROWS(call, 1, 1) break; \
    } \
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
  for (; o < to; o++) tile(job, type, 0, o, 1, 1);
}
#define F32_TILE(row, o, r, c) tile(job, F32, row, o, r, c)
#define F16_TILE(row, o, r, c) tile(job, F16, row, o, r, c)
static void plain_f32(const Job *job, int64_t from, int64_t to) {
  if (job->rows == 1) one(job, F32, from, to);
  else STRIPS(F32_TILE)
}
static void plain_f16(const Job *job, int64_t from, int64_t to) {
  if (job->rows == 1) one(job, F16, from, to);
  else STRIPS(F16_TILE)
}

/* -- 8 bits -------------------------------------------------------------------------------------------------------- */

IN void put8(const Job *job, int64_t row, int64_t o, int32_t sum) {
  const float v = (float)(sum - SHIFT * job->total[row]) * job->w->scale[o]; /* the scale has the 1 / 127 of the row in it */
  put(job, row, o, v * job->largest[row]);
}
IN void tile8(const Job *job, int64_t row, int64_t o, const int r, const int c) {
  const int64_t in = job->w->in, width = job->width, stride = in;
  const char *w = (const char *)job->w->w + o * in;
  const int8_t *x = job->codes + row * width;
  I s[TALL][C];
  B v[C];
  UNROLL for (int i = 0; i < r; i++) UNROLL for (int j = 0; j < c; j++) s[i][j] = iall(0);
  int64_t k = 0;
  for (; k + 64 <= in; k += 64) {
    UNROLL for (int j = 0; j < c; j++) {
      AHEAD(k / 64, , j, c);
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
#define TILE8(row, o, r, c) tile8(job, row, o, r, c)
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
  for (; o < to; o++) tile8(job, 0, o, 1, 1);
}
static void codes8(const Job *job, int64_t from, int64_t to) {
  if (job->rows == 1) one8(job, from, to);
  else STRIPS(TILE8)
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
#define TILE4(row, o, r, c) for (int output = 0; output < (c); output++) tile4(job, row, (o) + output, r)
static void codes4(const Job *job, int64_t from, int64_t to) {
  if (job->rows == 1) one4(job, from, to);
  else STRIPS(TILE4)
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

/* -- [I, O] -------------------------------------------------------------------------------------------------------- */

/* A part of the inputs for some columns and few rows, whose sums lie in the first cache: W is read along its rows. */
IN void along(const Job *job, const int type, int64_t k, const int64_t stop, int64_t o, int64_t n, float *sums, const int64_t step, const int deep) {
  const int64_t in = job->w->in, out = job->w->out, size = type == F32 ? 4 : 2;
  for (; k + deep <= stop; k += deep) {
    const char *w = (const char *)job->w->w + (k * out + o) * size;
    for (int64_t c = 0; c < n; c += 16) {
      F v[INPUTS];
      const int some = n - c < 16 ? (int)(n - c) : 16;
      UNROLL for (int d = 0; d < deep; d++) {
        __builtin_prefetch(w + (deep + d) * out * size + c * size, 0, 2);
        v[d] = some == 16 ? load(w + d * out * size, c, type) : loadn(w + d * out * size, c, type, some);
      }
      for (int64_t i = 0; i < job->rows; i++) {
        float *to = sums + i * step + c;
        const float *x = job->x + i * in + k;
        F s = ld(to);
        UNROLL for (int d = 0; d < deep; d++) s = fma16(all(x[d]), v[d], s);
        st(to, s);
      }
    }
  }
}
static void part_of(const Job *job, int part, int64_t o, int64_t n, float *sums, int64_t step) {
  const int64_t k = part * job->length, in = job->w->in, stop = k + job->length < in ? k + job->length : in;
  const int64_t whole_stop = k + (stop - k) / INPUTS * INPUTS;
  for (int64_t i = 0; i < job->rows; i++) memset(sums + i * step, 0, sizeof(float) * (size_t)((n + 15) & ~(int64_t)15));
#define ALONG(type) along(job, type, k, whole_stop, o, n, sums, step, INPUTS), along(job, type, whole_stop, stop, o, n, sums, step, 1)
  switch (job->w->type) {
  case F32: ALONG(F32); break;
  default: ALONG(F16);
  }
}
static void few_across(void *p, int number) {
  const Job *job = p;
  const int64_t out = job->w->out, blocks = (out + job->block - 1) / job->block, block = number % blocks, o = block * job->block;
  const int part = (int)(number / blocks);
  part_of(job, part, o, out - o < job->block ? out - o : job->block, sums_of(job, block, part), SUMS_ROW(job));
}
static void sum_parts(void *p, int block) {
  const Job *job = p;
  const int64_t from = block * job->block, rest = job->w->out - from, n = rest < job->block ? rest : job->block;
  for (int64_t i = 0; i < job->rows; i++)
    for (int64_t o = 0; o < n; o += 16) {
      F s = all(0);
      for (int part = 0; part < job->count; part++) s = add(s, ld(sums_of(job, block, part) + i * SUMS_ROW(job) + o));
      put16(job, i, from + o, n - o, s);
    }
}
/* Many rows: R rows by C times 16 columns in registers, a strip of columns, for a block of a part's inputs. Sums wait in `sums`
   [N, 16 C] between the blocks of a part, and in `total` between parts. The first tile reads W as it lies, where each row may be
   another page and all rows the same set of the first cache, and leaves `copy` [BLOCK, 16 C] to the others. The first two tiles
   ask for the next block, half of it each, so that memory is not idle while the others compute: all strips of a piece in turn ask
   along its rows, so that a page is looked up once. */
typedef struct {
  int64_t o, k, stop, part, part_stop; /* columns from o on, inputs [k, stop) of [part, part_stop) */
  int64_t strip, strips, depth;        /* of the piece; of a block */
  float *copy, *sums, *total;
} Across;
/* r rows by columns 16 [begin, end), of 16 C */
IN void tile_across(const Job *job, const Across *a, const int type, int64_t row, const int r, const int begin, const int end, const int tile) {
  const int64_t in = job->w->in, out = job->w->out, size = type == F32 ? 4 : 2, wide = out - a->o;
  const char *w = (const char *)job->w->w + (a->k * out + a->o) * size;
  const float *x = job->packed + row * in + a->k * r;
  F s[TALL][C], v[C];
  UNROLL for (int i = 0; i < r; i++) UNROLL for (int j = begin; j < end; j++)
    s[i][j] = a->k == a->part ? all(0) : ld(a->sums + ((row + i) * C + j) * 16);
  float *copy = a->copy;
  const int64_t asked = a->strip * (a->stop - a->k); /* by the strips before */
  int64_t next = asked % a->strips;
  const char *ahead = w + ((a->depth + asked / a->strips) * out - a->strip * 16 * C) * size;
  for (int64_t k = a->k; k < a->stop; k++, w += out * size, copy += 16 * C, x += r) {
    UNROLL for (int j = begin; j < end; j++) {
      if (tile == j * 2 / C && (type == F32 || !(j & 1))) __builtin_prefetch(ahead + (next * C + j) * 16 * size, 0, 2);
      if (tile) v[j] = ld(copy + 16 * j);
      else {
        v[j] = wide >= 16 * j + 16 ? load(w, 16 * j, type) : wide > 16 * j ? loadn(w, 16 * j, type, (int)(wide - 16 * j)) : all(0);
        st(copy + 16 * j, v[j]);
      }
    }
    if (tile < 2 && ++next == a->strips) next = 0, ahead += out * size;
    UNROLL for (int i = 0; i < r; i++) {
      F u = all(x[i]);
      UNROLL for (int j = begin; j < end; j++) s[i][j] = fma16(u, v[j], s[i][j]);
    }
  }
  UNROLL for (int i = 0; i < r; i++) UNROLL for (int j = begin; j < end; j++) {
    const int64_t at = ((row + i) * C + j) * 16;
    if (a->stop < a->part_stop) {
      st(a->sums + at, s[i][j]);
      continue;
    }
    const F t = add(a->part ? ld(a->total + at) : all(0), s[i][j]);
    if (a->stop < in) st(a->total + at, t);
    else if (wide > 16 * j) put16(job, row + i, a->o + 16 * j, wide - 16 * j, t);
  }
}
IN void rows_across(const Job *job, const Across *a, const int type, int64_t row, const int r, const int tile) {
  if (R == TALL || r <= R) {
    tile_across(job, a, type, row, r, 0, C, tile);
    return;
  }
  tile_across(job, a, type, row, r, 0, C / 2, 2); /* one half of the columns after the other */
  tile_across(job, a, type, row, r, C / 2, C, tile);
}
IN void block_across(const Job *job, const Across *a, const int type) {
  const int64_t rows = job->rows;
  int64_t row = R;
  tile_across(job, a, type, 0, R, 0, C, 0);
  if (rows >= row + TALL) rows_across(job, a, type, row, TALL, 1), row += TALL;
  for (; row + TALL <= rows; row += TALL) rows_across(job, a, type, row, TALL, 2);
  switch (rows - row) {
  case 5: rows_across(job, a, type, row, 5 < TALL ? 5 : TALL, 1); break;
  case 4: rows_across(job, a, type, row, 4 < TALL ? 4 : TALL, 1); break;
  case 3: rows_across(job, a, type, row, 3 < TALL ? 3 : TALL, 1); break;
  case 2: rows_across(job, a, type, row, 2 < TALL ? 2 : TALL, 1); break;
  case 1: rows_across(job, a, type, row, 1, 1); break;
  }
}
static void many_across(void *p, int number) {
  const Job *job = p;
  const int64_t in = job->w->in, each = 16 * C * job->rows, from = number * job->block, rest = job->w->out - from;
  Across a = {.depth = job->rows < DEEP_ROWS ? SHALLOW : BLOCK, .strips = ((rest < job->block ? rest : job->block) + 16 * C - 1) / (16 * C)};
  a.copy = scratch(4, sizeof(float) * (size_t)(BLOCK * 16 * C + 2 * each * a.strips));
  for (a.part = 0; a.part < in; a.part = a.part_stop) {
    a.part_stop = a.part + job->length < in ? a.part + job->length : in;
    for (a.k = a.part; a.k < a.part_stop; a.k = a.stop) {
      a.stop = a.k + a.depth < a.part_stop ? a.k + a.depth : a.part_stop;
      for (a.strip = 0; a.strip < a.strips; a.strip++) {
        a.o = from + a.strip * 16 * C;
        a.sums = a.copy + BLOCK * 16 * C + 2 * each * a.strip;
        a.total = a.sums + each;
        switch (job->w->type) {
        case F32: block_across(job, &a, F32); break;
        default: block_across(job, &a, F16);
        }
      }
    }
  }
}

/* -- rows in the form that a product reads -------------------------------------------------------------------------- */

static F row_part(const Job *job, int64_t row, int64_t k) {
  const int64_t in = job->w->in, n = in - k;
  return n >= 16 ? load(job->given, row * in + k, job->type) : n > 0 ? loadn(job->given, row * in + k, job->type, (int)n) : all(0);
}
static int32_t most(I v) {
  int32_t h[16], m = 0;
  ist(h, v);
  for (int l = 0; l < 16; l++) m = h[l] > m ? h[l] : m;
  return m;
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
static int32_t coded(const Job *job, int64_t row, int64_t k, int64_t stop, float *most_of_all, int8_t *to) {
  I top = iall(0), sum = iall(0);
  for (int64_t at = k; at < stop; at += 16) top = imax(top, bits(absolute(row_part(job, row, at))));
  const int32_t m = most(top);
  float largest;
  memcpy(&largest, &m, 4);
  if (m >= 0x7f800000) {
    memset(to, 0, (size_t)(stop - k));
    *most_of_all = NAN;
    return 0;
  }
  *most_of_all = largest;
  const F inverse = all(127.0f / largest);
  const int nothing = largest == 0 || 127.0f / largest > 3e38f; /* 0, or too small to be scaled up: no code at all */
  for (int64_t at = k; at < stop; at += 16) {
    I q = nothing ? iall(0) : whole(mul(row_part(job, row, at), inverse));
    int32_t c[16];
    ist(c, q);
    sum = iadd(sum, q);
    for (int l = 0; l < 16; l++) to[at - k + l] = (int8_t)c[l];
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

/* x as the tiles of [I, O] read it: number after number of a tile's rows, the rows of the first tile first */
IN void pack_rows(const float *x, float *to, int64_t in, const int r) {
  for (int64_t k = 0; k < in; k++) UNROLL for (int i = 0; i < r; i++) *to++ = x[i * in + k];
}
static void pack(void *p, int tile) {
  const Job *job = p;
  const int64_t in = job->w->in, row = tile ? R + (int64_t)(tile - 1) * TALL : 0, rest = tile ? job->rows - row : R;
  const float *x = job->x + row * in;
  float *to = (float *)job->packed + row * in;
  switch (rest < TALL ? rest : TALL) {
  case 1: pack_rows(x, to, in, 1); break;
  case 2: pack_rows(x, to, in, 2); break;
  case 3: pack_rows(x, to, in, 3); break;
  case 4: pack_rows(x, to, in, 4); break;
  case 5: pack_rows(x, to, in, 5); break;
  default: pack_rows(x, to, in, 6);
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
  } else if (w->type == BF16) {
    if (w->form == PLAIN) prepare_bf16(job); /* else across_bf16 does */
  } else if (job->type == F32) {
    job->x = job->given;
  } else {
    job->x = scratch(0, sizeof(float) * (size_t)(rows * w->in));
    pieces(widen, job, (int)rows, ready);
  }
  if (w->form == ACROSS && w->type != BF16 && rows > FEW) {
    job->packed = scratch(1, sizeof(float) * (size_t)(rows * w->in));
    pieces(pack, job, 1 + (int)((rows - R + TALL - 1) / TALL), ready);
  }
}
static void across(Job *job) {
  const Weight *w = job->w;
  const int64_t rows = job->rows;
  job->length = ((w->in + PARTS - 1) / PARTS + 7) & ~(int64_t)7;
  job->count = (int)((w->in + job->length - 1) / job->length);
  if (rows > FEW) {
    const int64_t strips = (w->out + 16 * C - 1) / (16 * C), share = strips / (2 * job->threads), most = BROAD / rows;
    job->block = (share < 1 || most < 1 ? 1 : share < most ? share : most) * 16 * C;
    pieces(many_across, job, (int)((w->out + job->block - 1) / job->block), job->threads);
    return;
  }
  const int64_t shares = (2 * job->threads + PARTS - 1) / PARTS; /* two pieces for each thread */
  const int64_t share = ((w->out + shares - 1) / shares + 63) / 64 * 64, most = SUMS(rows) / rows / 64 * 64;
  job->block = share < most ? share : most;
  const int64_t blocks = (w->out + job->block - 1) / job->block;
  job->parts = scratch(1, sizeof(float) * (size_t)(blocks * job->count * rows * SUMS_ROW(job)));
  pieces(few_across, job, (int)(job->count * blocks), job->threads);
  pieces(sum_parts, job, (int)blocks, rows * w->out > 1 << 14 ? job->threads : 1);
}
/* A piece is 128 KB of the weight, and strips; with one row, which no cache serves, 512 KB, and as many for each thread. */
static void cut(Job *job) {
  const Weight *w = job->w;
  const int eight = w->form == CODES8 || w->form == BLOCKS8, together = w->form >= BLOCKS8 ? 16 : 4;
  const int64_t bytes = eight ? w->in : w->form >= CODES8 ? w->in / 2 + w->in / 8 : w->in * (w->type == F32 ? 4 : 2);
  int64_t block = (131072 / (bytes ? bytes : 1) + STRIP) / STRIP * STRIP;
  if (job->rows == 1) {
    const int64_t rounds = (w->out * bytes / job->threads + 524287) / 524288, count = job->threads * (rounds ? rounds : 1);
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
