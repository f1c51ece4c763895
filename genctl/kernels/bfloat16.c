/* y = x W' + bias for bfloat16 weights [O, I] as they lie. The order of sums: bfloat16.h. */
#include "amx.h"
#include "bfloat16.h"
#include "tiles.h"
#include "transposed.h"

/* -- outputs -------------------------------------------------------------------------------------------------------- */

#define NUMBERS(w) (there == 32 ? ldc(w) : ldcn(w, 2 * there))
/* Sums of r rows by c outputs over 32 numbers, of which some are `there` */
IN void widened(F s[R][C], const uint16_t *w, int64_t line, const int there, const char *x, int64_t x_row, const int r, const int c) {
  UNROLL for (int half = 0; half < 2; half++) {
    F n[C];
    __asm__("" : "+r"(w)); /* numbers are loaded once for each half: kept in between, they would take the registers of sums */
    UNROLL for (int j = 0; j < c; j++) n[j] = half ? first(NUMBERS(w + j * line)) : second(NUMBERS(w + j * line));
    UNROLL for (int i = 0; i < r; i++) {
      const F u = ld((const float *)(x + i * x_row) + 16 * half);
      UNROLL for (int j = 0; j < c; j++) s[i][j] = fma16(u, n[j], s[i][j]);
    }
  }
}
IN void paired(F s[R][C], const uint16_t *w, int64_t line, const int there, const char *x, int64_t x_row, const int r, const int c) {
  B v[C];
  UNROLL for (int j = 0; j < c; j++) v[j] = NUMBERS(w + j * line);
  UNROLL for (int i = 0; i < r; i++) {
    const B u = ldc(x + i * x_row);
    UNROLL for (int j = 0; j < c; j++) s[i][j] = dot(s[i][j], v[j], u);
  }
}

#define STEP(there) \
  (form == PAIRED ? paired(s, w + at, line, there, x + at * 2, x_row, r, c) : widened(s, w + at, line, there, x + at * 4, x_row, r, c))
IN void tile(const Job *job, int64_t row, int64_t o, int64_t apart, const int r, const int c, const int form, const Next asked) {
  const int64_t in = job->w->in, line = apart * in, x_row = job->width * (form == WIDENED ? 4 : 2);
  const uint16_t *w = (const uint16_t *)job->w->w + o * in;
  const char *x = (const char *)job->x + row * x_row;
  /* what comes next in long rows, or else the next four outputs, or where there is one row those after them: line after line, so
     that memory sees one stream and not one for each output */
  const Next next = job->runs ? asked : C > 2 && 2 * in >= PAGE ? along_rows((const char *)w, c, 2 * in) : (Next){(const char *)(w + (r == 1 ? 2 : 1) * c * in), c, 64 * c, 64};
  Q sum[R];
  UNROLL for (int i = 0; i < r; i++) sum[i] = nothing();
  for (int64_t k = 0; k < in; k += BLOCK) {
    const int64_t stop = k + BLOCK < in ? k + BLOCK : in;
    F s[R][C];
    EACH_SUM(r, 0, c) s[i][j] = all(0);
    int64_t at = k;
    for (; at + 32 <= stop; at += 32) {
      UNROLL for (int j = 0; j < c; j++) ASK(at / 32, j);
      STEP(32);
    }
    if (at < stop) STEP((int)(stop - at));
    UNROLL for (int i = 0; i < r; i++) sum[i] = fold(sum[i], s[i][0], s[i][1 % c], s[i][2 % c], s[i][3 % c]);
  }
  UNROLL for (int i = 0; i < r; i++) {
    float y[4];
    stq(y, sum[i]);
    UNROLL for (int j = 0; j < c; j++) put(job, row + i, o + j * apart, y[j]);
  }
}
static void single(const Job *job, int64_t row, int64_t o) { tile(job, row, o, 1, 1, 1, WIDENED, (Next){0}); }
static void single_paired(const Job *job, int64_t row, int64_t o) { tile(job, row, o, 1, 1, 1, PAIRED, (Next){0}); }
IN void some_rows(const Job *job, int64_t row, int64_t o, int64_t tiles, int64_t apart, const int form, Next next, const int r) {
  for (int64_t n = 0; n < tiles; n++, o += job->runs ? 1 : C, next.at += 2 * job->w->in) tile(job, row, o, apart, r, C, form, next);
}
IN void all_rows(const Job *job, int64_t from, int64_t to, const int form) {
  const int64_t rows = job->rows, stride = 2 * job->w->in, tiles = (to - from) / C, passes = (rows + R - 1) / R, apart = job->runs ? tiles : 1;
  const int64_t most = rows == 1 || (job->runs && passes == 1) ? tiles : job->runs ? strip_of(0, passes, stride) / C : STRIP / C;
  for (int64_t begin = 0, end; begin < tiles; begin = end) {
    end = begin + most < tiles ? begin + most : tiles;
    const int64_t o = from + begin * (job->runs ? 1 : C), after = end < tiles ? from + end : from + job->threads * job->block;
    const char *w = job->w->w;
    int64_t row = 0;
    int pass = 0;
#define ASKED(r) (passes > 1 ? share_of_runs(w + after * stride, apart * stride, pass++, passes) : in_runs(w + o * stride, r, C, apart * stride))
#define SOME(apart, r) some_rows(job, row, o, end - begin, apart, form, ASKED(r), r)
    EACH_TILE(row, rows, R, SOME, apart)
  }
  for (int64_t o = from + tiles * C; o < to; o++)
    for (int64_t row = 0; row < rows; row++) (form == PAIRED ? single_paired : single)(job, row, o);
}
#if defined(__AVX2__) && !defined(__AVX512F__)
/* With 16 registers: inputs [from, stop) of one output and up to six rows, so that W is read, and widened, for all of them at once.
   `sums` of four rows each are added up in turn. */
IN void tall_tile(const Job *job, int64_t row, int64_t o, const int r, int64_t from, int64_t stop, const uint16_t *next, Q *sums) {
  const int64_t in = job->w->in, width = job->width;
  const uint16_t *w = (const uint16_t *)job->w->w + o * in;
  const float *x = job->x + row * width;
  Q sum[2] = {from ? sums[0] : nothing(), from ? sums[1] : nothing()};
  for (int64_t k = from, end; k < stop; k = end) {
    end = k + BLOCK < stop ? k + BLOCK : stop;
    F s[6];
    UNROLL for (int i = 0; i < r; i++) s[i] = all(0);
    for (int64_t at = k; at < end; at += 32) {
      const B v = end - at >= 32 ? ldc(w + at) : ldcn(w + at, 2 * (int)(end - at));
      __builtin_prefetch(next + at - from, 0, 2);
      UNROLL for (int half = 0; half < 2; half++) {
        const F n = half ? first(v) : second(v);
        UNROLL for (int i = 0; i < r; i++) s[i] = fma16(ld(x + i * width + at + 16 * half), n, s[i]);
      }
    }
    sum[0] = fold(sum[0], s[0], s[1 % r], s[2 % r], s[3 % r]);
    if (r > 4) sum[1] = fold(sum[1], s[4], s[r - 1], s[4], s[r - 1]);
  }
  sums[0] = sum[0], sums[1] = sum[1];
  if (stop < in) return;
  float y[8];
  stq(y, sum[0]), stq(y + 4, sum[1]);
  UNROLL for (int i = 0; i < r; i++) put(job, row + i, o, y[i]);
}
/* Where there are many inputs they are taken in blocks, so that those of the rows stay in the first cache. Asked for ahead is what
   is read next of the same output, or of the one that takes its place in the next strip. */
#define DEPTH 1024
#define WHOLE 1536
IN void tall_tiles(const Job *job, int64_t row, int64_t from, int64_t to, const int r) {
  const int64_t in = job->w->in, depth = in > WHOLE ? DEPTH : in;
  const uint16_t *w = job->w->w;
  Q sums[16][2];
  for (int64_t k = 0, stop; k < in; k = stop) {
    stop = k + depth < in ? k + depth : in;
    for (int64_t o = from; o < to; o++)
      tall_tile(job, row, o, r, k, stop, depth == in ? w + o * in + 2 * DEPTH : stop < in ? w + o * in + stop : w + (o + 16) * in, sums[o - from]);
  }
}
static void tall_rows(const Job *job, int64_t from, int64_t to) { /* four or more, in tiles of nearly the same height */
  for (int64_t o = from, end; o < to; o = end) {
    end = o + 16 < to ? o + 16 : to;
    int64_t row = 0;
    for (int64_t left = (job->rows + 5) / 6, height; left > 0; left--, row += height) {
      height = (job->rows - row + left - 1) / left; /* three of seven rows */
      NEXT_TILE(height, 6, tall_tiles, job, row, o, end)
    }
  }
}
#endif
static __attribute__((noinline)) void compute(const Job *job, int64_t from, int64_t to) {
  if (HAS_AMX && job->form == TILED) outputs_amx(job, from, to);
  else if (HAS_PAIRS && job->form == PAIRED) all_rows(job, from, to, PAIRED);
  else if (job->form == TRANSPOSED) outputs_transposed_bf16(job, from, to);
#if defined(__AVX2__) && !defined(__AVX512F__)
  else if (job->rows >= 4) tall_rows(job, from, to);
#endif
  else all_rows(job, from, to, WIDENED);
}
void plain_bf16(const Job *job, int64_t from, int64_t to) {
  const Mode mode = tiny_is_zero();
  compute(job, from, to);
  as_before(mode);
}

/* -- rows of x, with zeros up to a multiple of 32; as float32 the second numbers of 16 pairs lie before the first ones -- */

static void widen_pairs(void *p, int row) {
  const Job *job = p;
  const int64_t in = job->w->in;
  float *x = (float *)job->x + row * job->width;
  for (int64_t k = 0; k < in; k += 32, x += 32) {
    const int n = in - k < 32 ? (int)(in - k) : 32;
    if (job->type == BF16) {
      const B v = ldcn((const uint16_t *)job->given + row * in + k, 2 * n);
      st(x, second(v));
      st(x + 16, first(v));
      continue;
    }
    for (int l = 0; l < 32; l++) x[l / 2 + (l & 1 ? 0 : 16)] = l < n ? get(job->given, row * in + k + l, job->type) : 0;
  }
}
void copy_pairs(void *p, int row) {
  const Job *job = p;
  const int64_t in = job->w->in, swapped = job->w->form == IN_OUT;
  const uint16_t *given = (const uint16_t *)job->given + row * in;
  uint16_t *x = (uint16_t *)job->x + row * job->width;
  for (int64_t k = 0; k < job->width; k++) x[k ^ swapped] = k < in ? given[k] : 0;
}
#define MANY_PAIRS 33 /* rows from which on outputs are transposed */
void prepare_bf16(Job *job) {
  const int64_t rows = job->rows, in = job->w->in;
  const int threads = rows * in > 1 << 15 ? job->threads : 1;
  job->width = (in + 31) & ~(int64_t)31;
  if (HAS_PAIRS && job->type == BF16) {
    job->form = rows >= MANY_PAIRS && in >= 256 ? TRANSPOSED : PAIRED;
    job->x = job->width == in ? job->given : scratch(0, 2 * (size_t)(rows * job->width));
    if (job->width != in) pieces(copy_pairs, job, (int)rows, threads);
    return;
  }
  if (HAS_AMX && job->type == BF16 && rows >= AMX_ROWS) {
    job->form = TILED;
    prepare_amx(job);
    return;
  }
  job->form = may_transpose(job) ? TRANSPOSED : WIDENED;
  job->x = scratch(0, sizeof(float) * (size_t)(rows * job->width));
  pieces(widen_pairs, job, (int)rows, threads);
  if (job->form == TRANSPOSED) pack_transposed_bf16(job, threads);
}
