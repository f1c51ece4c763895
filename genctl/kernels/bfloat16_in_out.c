/* y = x W + bias for bfloat16 weights [I, O] as they lie.

   The inputs are cut into at most PARTS_BF16 parts, multiples of 32; parts are added in turn. Of each 32 inputs the first 16 are
   one chain from 0 on, the others another; the sum of the two is added to that of the part. tdpbf16ps can follow this (amx.c). */
#include "amx.h"
#include "bfloat16.h"
#include "in_out.h"

/* FEW: rows up to which whole rows of a weight are read, and sums lie in the caches; more: tiles. GROUP: of few rows those whose sums are in
   registers. */
#if defined(__AMX_BF16__)
#define FEW 12
#elif defined(__AVX512BF16__)
#define FEW 8
#elif defined(__AVX512F__)
#define FEW 20
#else
#define FEW 16
#endif
#ifdef __AVX512F__
#define GROUP R
#else /* fewer registers */
#define GROUP 2
#endif
#define SUMS 8192 /* the most sums of a piece */

/* -- few rows: a chain of 16 inputs along some columns; of 32 columns the sums of the second ones of pairs lie first ------- */

/* Inputs whose rows of a weight are read side by side. AMD's CPUs follow eight rows, and sums of a chain wait in between; others
   were measured with all 16. */
#if defined(__AVX512F__) && !defined(__AVX512BF16__)
#define INPUTS 16
#else
#define INPUTS 8
#endif
/* Where a chain's sums are, those of the first chain for the end of the second one, and the part's; what is asked for ahead, and how
   far its lines are apart */
typedef struct {
  float *chain, *sums;
  const float *first;
  const char *ahead;
  int64_t apart;
} Along;
IN void group_along(const Job *job, const Along *a, int64_t k, const int there, int64_t o, int64_t c, const int some, int64_t row, const int rows, const int begins, const int ends) {
  const int64_t out = job->w->out, step = SUMS_ROW(job);
  const float *x = job->x + row * job->width + k;
  const uint16_t *w = (const uint16_t *)job->w->w + k * out + o + c;
  const char *ahead = a->ahead + (a->apart == 64 ? INPUTS : 1) * 2 * c;
  F s[2][GROUP]; /* halves of pairs, rows */
  UNROLL for (int i = 0; i < rows; i++) UNROLL for (int half = 0; half < 2; half++)
    s[half][i] = begins ? all(0) : ld(a->chain + (row + i) * step + c + 16 * half);
  DEEP for (int d = 0; d < INPUTS; d++, w += out) {
    if (d >= there) break;
    if (!row) __builtin_prefetch(ahead + d * a->apart, 0, 2);
    const B v = some == 32 ? ldc(w) : ldcn(w, 2 * some);
    UNROLL for (int i = 0; i < rows; i++) {
      const F u = all(x[i * job->width + d]);
      s[0][i] = fma16(u, second(v), s[0][i]);
      s[1][i] = fma16(u, first(v), s[1][i]);
    }
  }
  UNROLL for (int i = 0; i < rows; i++) UNROLL for (int half = 0; half < 2; half++) {
    const int64_t at = (row + i) * step + c + 16 * half;
    if (ends) st(a->sums + at, add(ld(a->sums + at), add(ld(a->first + at), s[half][i])));
    else st(a->chain + at, s[half][i]);
  }
}
IN void along(const Job *job, const Along *a, int64_t k, const int there, int64_t o, int64_t n, const int rest, const int begins, const int ends) {
  for (int64_t c = 0; c < n; c += 32) {
    const int some = n - c < 32 ? (int)(n - c) : 32;
    int64_t row = 0;
    for (; row + GROUP <= job->rows; row += GROUP) group_along(job, a, k, there, o, c, some, row, GROUP, begins, ends);
    if (rest) group_along(job, a, k, there, o, c, some, row, rest, begins, ends);
  }
}
/* Inputs of a chain of which some are missing: `there` may be 0 or less */
static __attribute__((noinline)) void last_along(const Job *job, const Along *a, int64_t k, int there, int64_t o, int64_t n, int begins, int ends) {
  for (int64_t c = 0; c < n; c += 32)
    for (int64_t row = 0; row < job->rows; row++)
      group_along(job, a, k, there, o, c, n - c < 32 ? (int)(n - c) : 32, row, 1, begins, ends);
}
IN void part_of(const Job *job, int64_t k, int64_t stop, int64_t o, int64_t n, float *sums, const int rest) {
  const int64_t size = job->rows * SUMS_ROW(job), out = job->w->out;
  float *chains = scratch(4, sizeof(float) * (size_t)(2 * size));
  /* whole rows of 8 inputs are one stretch of memory, and asked for from begin to end; columns row by row */
  Along a = {.sums = sums, .first = chains, .apart = n == out && INPUTS < 16 ? 64 : 2 * out};
  memset(sums, 0, sizeof(float) * (size_t)size);
  for (; k < stop; k += 32)
    for (int d = 0; d < 32; d += INPUTS) {
      const int begins = d % 16 == 0, ends = d == 32 - INPUTS, there = (int)(stop - k - d);
      a.chain = chains + d / 16 * size;
      a.ahead = (const char *)((const uint16_t *)job->w->w + (k + d + INPUTS) * out + o);
      if (there < INPUTS) last_along(job, &a, k + d, there, o, n, begins, ends);
      else if (ends) along(job, &a, k + d, INPUTS, o, n, rest, INPUTS == 16, 1);
      else if (begins) along(job, &a, k + d, INPUTS, o, n, rest, 1, 0);
      else along(job, &a, k + d, INPUTS, o, n, rest, 0, 0);
    }
}
static void few_rows(void *p, int number) {
  const Job *job = p;
  const int64_t out = job->w->out, in = job->w->in, blocks = (out + job->block - 1) / job->block, block = number % blocks;
  const int64_t o = block * job->block, n = out - o < job->block ? out - o : job->block;
  const int64_t part = number / blocks, k = part * job->length, stop = k + job->length < in ? k + job->length : in;
  float *sums = sums_of(job, block, part);
  const Mode mode = tiny_is_zero();
  if (job->rows % GROUP == 0) part_of(job, k, stop, o, n, sums, 0);
  else LAST_TILE(job->rows % GROUP, GROUP, part_of, job, k, stop, o, n, sums)
  as_before(mode);
}
static void sum_parts(void *p, int block) {
  const Job *job = p;
  const int64_t from = block * job->block, rest = job->w->out - from, n = rest < job->block ? rest : job->block;
  const Mode mode = tiny_is_zero();
  for (int64_t i = 0; i < job->rows; i++)
    for (int64_t o = 0; o < n; o += 32) {
      float sums[32], v[32];
      for (int half = 0; half < 2; half++) {
        const int64_t at = i * SUMS_ROW(job) + o + 16 * half;
        F s = ld(sums_of(job, block, 0) + at);
        for (int part = 1; part < job->count; part++) s = add(s, ld(sums_of(job, block, part) + at));
        st(sums + 16 * half, s);
      }
      for (int l = 0; l < 16; l++) v[2 * l] = sums[16 + l], v[2 * l + 1] = sums[l];
      put16(job, i, from + o, n - o, ld(v));
      if (n - o > 16) put16(job, i, from + o + 16, n - o - 16, ld(v + 16));
    }
  as_before(mode);
}

/* -- many rows: TALL rows by WIDE columns, or half of them, in registers ------------------------------------------------------ */

/* `copy` is of W: WIDENED float32 [inputs, WIDE]; PAIRED two rows side by side [inputs / 2, WIDE, 2], second numbers first */
IN void copy_widened(const uint16_t *one, const uint16_t *two, float *to) {
  UNROLL for (int j = 0; j < C; j++) {
    st(to + 16 * j, load(one, 16 * j, BF16));
    st(to + WIDE + 16 * j, load(two, 16 * j, BF16));
  }
}
IN void copy_paired(const uint16_t *one, const uint16_t *two, float *to) {
  uint16_t *restrict pairs = (uint16_t *)to;
  for (int l = 0; l < WIDE; l++) pairs[2 * l] = two[l], pairs[2 * l + 1] = one[l];
}
IN void copy(const Job *job, const InOut *a, const int form) { /* zeros behind the last input and the last column */
  const int64_t out = job->w->out, in = job->w->in, n = out - a->o < WIDE ? out - a->o : WIDE;
  const uint16_t *w = (const uint16_t *)job->w->w + a->o;
  uint16_t rest[2][WIDE];
  float *to = a->copy;
  for (int64_t k = a->k; k < a->stop; k += 2, to += form == PAIRED ? WIDE : 2 * WIDE) {
    const uint16_t *one = w + k * out, *two = one + out;
    for (int64_t c = 0; c < n; c += 32) __builtin_prefetch(one + DEPTH_BF16 * out + c, 0, 2), __builtin_prefetch(two + DEPTH_BF16 * out + c, 0, 2);
    if (n < WIDE || k + 2 > in) {
      memset(rest, 0, sizeof rest);
      for (int d = 0; d < 2 && k + d < in; d++) memcpy(rest[d], w + (k + d) * out, 2 * (size_t)n);
      one = rest[0], two = rest[1];
    }
    if (form == PAIRED) copy_paired(one, two, to);
    else copy_widened(one, two, to);
  }
}
/* Columns 16 [begin, end): of each 32 inputs two chains */
IN void columns(const Job *job, const InOut *a, int64_t row, const int r, const int begin, const int end) {
  const float *w = a->copy, *x = job->packed + a->k * job->rows + row * (a->stop - a->k);
  for (int64_t k = a->k; k < a->stop; k += 32, w += 32 * WIDE) {
    F s[TALL][C];
    float kept[TALL][C][16];
    EACH_SUM(r, begin, end) s[i][j] = all(0);
    x = chain(s, w, WIDE, x, 16, r, begin, end);
    EACH_SUM(r, begin, end) st(kept[i][j], s[i][j]), s[i][j] = all(0);
    x = chain(s, w + 16 * WIDE, WIDE, x, 16, r, begin, end);
    EACH_SUM(r, begin, end) {
      float *sum = a->sums + ((row + i) * C + j) * 16;
      const F both = add(ld(kept[i][j]), s[i][j]);
      st(sum, k == a->part ? both : add(ld(sum), both));
    }
  }
}
IN void tile(const Job *job, const InOut *a, int64_t row, const int r) {
  if (OUTPUTS > 1) columns(job, a, row, r, 0, C);
  else { /* with 16 registers: more sums at a time, so that none waits for its own last number */
    columns(job, a, row, r, 0, C / 2);
    columns(job, a, row, r, C / 2, C);
  }
}
#define HIGH 2 /* rows of a tile, whose two chains and sums are in registers */
IN void tile_of_pairs(const Job *job, const InOut *a, int64_t row, const int r) {
  const float *w = a->copy;
  F sum[HIGH][C];
  UNROLL for (int i = 0; i < r; i++) for (int64_t k = a->k; k < a->stop; k += 32)
    __builtin_prefetch((const uint16_t *)job->x + (row + HIGH + i) * job->width + k, 0, 3);
  EACH_SUM(r, 0, C) sum[i][j] = a->k == a->part ? all(0) : ld(a->sums + ((row + i) * C + j) * 16);
  for (int64_t k = a->k; k < a->stop; k += 32, w += 16 * WIDE) {
    F s[2][HIGH][C];
    UNROLL for (int n = 0; n < 2; n++) EACH_SUM(r, 0, C) s[n][i][j] = all(0);
    for (int d = 0; d < 8; d++) UNROLL for (int n = 0; n < 2; n++) {
      B v[C];
      UNROLL for (int j = 0; j < C; j++) v[j] = ldc(w + (8 * n + d) * WIDE + 16 * j);
      UNROLL for (int i = 0; i < r; i++) {
        const B u = four((const uint16_t *)job->x + (row + i) * job->width + k + 16 * n + 2 * d);
        UNROLL for (int j = 0; j < C; j++) s[n][i][j] = dot(s[n][i][j], v[j], u);
      }
    }
    EACH_SUM(r, 0, C) {
      const F both = add(s[0][i][j], s[1][i][j]);
      sum[i][j] = k == a->part ? both : add(sum[i][j], both);
    }
  }
  EACH_SUM(r, 0, C) st(a->sums + ((row + i) * C + j) * 16, sum[i][j]);
}
static void end_part(const Job *job, const InOut *a) {
  const int64_t rows = job->rows, wide = job->w->out - a->o;
  for (int64_t i = 0; i < rows; i++)
    for (int j = 0; j < C; j++) {
      const int64_t at = (i * C + j) * 16;
      const F sum = ld(a->sums + at), total = a->part ? add(ld(a->total + at), sum) : sum;
      if (a->part_stop < job->width) st(a->total + at, total);
      else if (wide > 16 * j) put16(job, i, a->o + 16 * j, wide - 16 * j, total);
    }
}
static void block(const Job *job, const InOut *a) {
  int64_t row = 0;
  if (HAS_PAIRS && job->form == PAIRED) {
    copy(job, a, PAIRED);
    for (; row + HIGH <= job->rows; row += HIGH) tile_of_pairs(job, a, row, HIGH);
    if (row < job->rows) tile_of_pairs(job, a, row, 1);
  } else {
    copy(job, a, WIDENED);
    EACH_TILE(row, job->rows, TALL, tile, job, a, row)
  }
  if (a->stop == a->part_stop) end_part(job, a);
}
static void many_rows(void *job, int number) {
  const Mode mode = tiny_is_zero();
  all_blocks(job, number, block);
  as_before(mode);
}

static void outputs_of(void *p, int number) {
  const Job *job = p;
  const int64_t from = number * job->block, out = job->w->out;
  const Mode mode = tiny_is_zero();
  outputs_amx(job, from, from + job->block < out ? from + job->block : out);
  as_before(mode);
}
void in_out_bf16(Job *job) {
  const int64_t rows = job->rows, in = job->w->in, out = job->w->out;
  const int threads = rows * in * out < 1 << 15 ? 1 : job->threads, ready = rows * in > 1 << 15 ? job->threads : 1;
  job->length = ((in + PARTS_BF16 - 1) / PARTS_BF16 + 31) & ~(int64_t)31;
  job->count = (int)((in + job->length - 1) / job->length);
  job->width = (in + 31) & ~(int64_t)31;
  if (HAS_AMX && job->type == BF16 && rows > FEW) {
    prepare_amx(job);
    job->block = in > 4096 ? 64 : 128; /* outputs of a piece */
    pieces(outputs_of, job, (int)((out + job->block - 1) / job->block), threads);
    return;
  }
  job->form = HAS_PAIRS && job->type == BF16 && rows > FEW ? PAIRED : WIDENED;
  if (rows > FEW) {
    if (job->form == PAIRED) {
      job->x = scratch(0, 2 * (size_t)(rows * job->width));
      pieces(copy_pairs, job, (int)rows, ready);
    } else pack_in_out(job, ready);
    job->block = WIDE;
    pieces(many_rows, job, (int)((out + WIDE - 1) / WIDE), threads);
    return;
  }
  job->x = scratch(0, sizeof(float) * (size_t)(rows * job->width));
  pieces(widen, job, (int)rows, ready);
  const int64_t shares = (threads + job->count - 1) / job->count; /* whole rows, where parts are enough for the threads */
  const int64_t share = ((out + shares - 1) / shares + 63) / 64 * 64, most = SUMS / rows / 64 * 64;
  job->block = share < most ? share : most;
  const int64_t blocks = (out + job->block - 1) / job->block;
  job->parts = scratch(1, sizeof(float) * (size_t)(blocks * job->count * rows * SUMS_ROW(job)));
  pieces(few_rows, job, (int)(job->count * blocks), threads);
  pieces(sum_parts, job, (int)blocks, rows * out > 1 << 14 ? threads : 1);
}
