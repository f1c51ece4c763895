/* y [N, O] = x [N, I] W' + bias, for any number of rows N.

   Each output is summed by one thread in an order that the sizes alone decide: a row has the same bits alone and among
   others, with one thread and with many, and in float32 sums on every instruction set.
     [O, I]: lane l adds up the inputs k = l mod 16, in turn; then the tree of lanes.h. Many rows: transposed.c, the same sums.
     [I, O]: see in_out.c. bfloat16: see bfloat16.c and bfloat16_in_out.c.
     Codes of 8 bits: see codes.c. Blocks of 4 to 8 bits: see blocks.c.
   A tile of TALL rows by OUTPUTS keeps its sums in registers, and reads W and x as they lie: nothing is packed. */
#include "amx.h"
#include "tiles.h"

/* -- [O, I] -------------------------------------------------------------------------------------------------------- */

/* Where x is large, inputs are taken in blocks: those of a tile of rows stay in the first cache while the outputs of a strip pass,
   and sums of GROUP tiles wait in the second. */
#define DEPTH 1024
#define GROUP (10 * TALL)
#if defined(__AVX2__) && !defined(__AVX512F__) /* a tile has one output, and would read x from the second cache for each */
#define DEEP_STRIP 16
IN int is_deep(const Job *job) {
  const int64_t rows = job->rows, in = job->w->in;
  return rows > TALL ? in > DEPTH && rows * in > 1 << 14 : rows > 1 && in > 4 * DEPTH;
}
#else
#define DEEP_STRIP 32
IN int is_deep(const Job *job) { return job->rows > TALL && job->w->in > DEPTH && job->rows * job->w->in > 1 << 18; }
#endif

/* Inputs [from, stop) of r rows by c outputs: added to `sums` [DEEP_STRIP, 16] of each row, and summed up if they are the last. */
IN void tile(const Job *job, const int type, int64_t row, int64_t o, int64_t apart, const int r, const int c, const Next next, int64_t from, int64_t stop, float *sums) {
  const int64_t in = job->w->in, size = type == F32 ? 4 : 2, stride = apart * in * size, step = DEEP_STRIP * 16;
  const char *w = (const char *)job->w->w + (o * in + from) * size;
  const float *x = job->x + row * in + from;
  F s[TALL][C], v[C];
  EACH_SUM(r, 0, c) s[i][j] = from ? ld(sums + i * step + 16 * j) : all(0);
  const int64_t n = stop - from;
  int64_t k = 0;
  for (; k + 16 <= n; k += 16) {
    UNROLL for (int j = 0; j < c; j++) {
      if (type == F32 || !(k & 16)) {
        ASK(type == F32 ? k / 16 : k / 32, j);
      }
      v[j] = load(w + j * stride, k, type);
    }
    UNROLL for (int i = 0; i < r; i++) {
      F u = ld(x + i * in + k);
      UNROLL for (int j = 0; j < c; j++) s[i][j] = fma16(u, v[j], s[i][j]);
    }
  }
  if (stop < in) {
    EACH_SUM(r, 0, c) st(sums + i * step + 16 * j, s[i][j]);
    return;
  }
  if (k < n) {
    UNROLL for (int j = 0; j < c; j++) v[j] = loadn(w + j * stride, k, type, (int)(n - k));
    UNROLL for (int i = 0; i < r; i++) {
      F u = ldn(x + i * in + k, (int)(n - k));
      UNROLL for (int j = 0; j < c; j++) s[i][j] = fma16(u, v[j], s[i][j]);
    }
  }
  int i = 0;
  if (c == 4 && r >= 4) {
    F v[16];
    float y[16];
    UNROLL for (int j = 0; j < 4; j++) UNROLL for (int l = 0; l < 4; l++) v[4 * j + l] = s[l % TALL][j % C];
    tree16(v, y);
    UNROLL for (; i < 4; i++) put4(job, row + i, o, apart, y + 4 * i);
  }
  if (c == 1 && r > 1) {
    UNROLL for (; i < r; i += 4) {
      float y[4];
      tree4(s[i][0], s[i + 1 < r ? i + 1 : i][0], s[i + 2 < r ? i + 2 : i][0], s[i + 3 < r ? i + 3 : i][0], y);
      UNROLL for (int l = 0; l < 4 && i + l < r; l++) put(job, row + i + l, o, y[l]);
    }
  }
  UNROLL for (; i < r; i++) {
    if (c == 4) {
      float y[4];
      tree4(s[i][0], s[i][1 % C], s[i][2 % C], s[i][3 % C], y);
      put4(job, row + i, o, apart, y);
    } else UNROLL for (int j = 0; j < c; j++) put(job, row + i, o + j * apart, tree(s[i][j]));
  }
}

/* One row and one output, where no other tile fits */
static __attribute__((noinline)) void single(const Job *job, int type, int64_t row, int64_t o, int64_t from, int64_t stop, float *sums) {
  if (type == F32) tile(job, F32, row, o, 1, 1, 1, (Next){0}, from, stop, sums);
  else tile(job, F16, row, o, 1, 1, 1, (Next){0}, from, stop, sums);
}
/* One row: four outputs, each a chain of its own, in runs or side by side. What is asked for ahead is then the second four after
   them, line after line, so that memory sees one stream and not four; or what comes next in runs and in long rows. Which of them is
   known when this is compiled. */
enum { SIDE_BY_SIDE, LONG_ROWS, IN_RUNS };
IN void one(const Job *job, const int type, int64_t from, int64_t to, const int how) {
  const int64_t in = job->w->in, stride = in * (type == F32 ? 4 : 2), step = type == F32 ? 16 : 32, tiles = (to - from) / 4;
  const int64_t apart = how == IN_RUNS ? tiles : 1, line = apart * stride;
  const float *x = job->x;
  for (int64_t n = 0; n < tiles; n++) {
    const int64_t o = from + n * (how == IN_RUNS ? 1 : 4);
    const char *w = (const char *)job->w->w + o * stride;
    const Next next = how == IN_RUNS ? in_runs(w, 1, 4, line) : how == LONG_ROWS ? along_rows(w, 4, stride) : (Next){w + 8 * stride, 4, 256, 64};
    F s[4];
    UNROLL for (int j = 0; j < 4; j++) s[j] = all(0);
    int64_t k = 0;
    for (; k + step <= in; k += step) {
      F u = ld(x + k), v = type == F32 ? u : ld(x + k + 16);
      UNROLL for (int j = 0; j < 4; j++) {
        ASK(k / step, j);
        s[j] = fma16(u, load(w + j * line, k, type), s[j]);
        if (type != F32) s[j] = fma16(v, load(w + j * line, k + 16, type), s[j]);
      }
    }
    for (; k < in; k += 16) {
      const int n = in - k < 16 ? (int)(in - k) : 16;
      F u = n == 16 ? ld(x + k) : ldn(x + k, n);
      UNROLL for (int j = 0; j < 4; j++) s[j] = fma16(u, n == 16 ? load(w + j * line, k, type) : loadn(w + j * line, k, type, n), s[j]);
    }
    float y[4];
    tree4(s[0], s[1], s[2], s[3], y);
    put4(job, 0, o, apart, y);
  }
  for (int64_t o = from + 4 * tiles; o < to; o++) single(job, type, 0, o, 0, in, 0);
}
IN void outputs_of(const Job *job, const int type, int64_t row, int64_t begin, int64_t end, Next next, int64_t k, int64_t stop, float *sums, const int r) {
  const int64_t size = type == F32 ? 4 : 2, stride = OUTPUTS == 1 ? job->w->in * size : next.lines * (stop - k) * size;
  int64_t o = begin;
  for (; o + OUTPUTS <= end; o += OUTPUTS, sums += 16 * OUTPUTS, next.at += stride) tile(job, type, row, o, 1, r, OUTPUTS, next, k, stop, sums);
  for (; o < end; o++, sums += 16)
    for (int i = 0; i < r; i++) single(job, type, row + i, o, k, stop, sums + i * DEEP_STRIP * 16);
}
IN void deep(const Job *job, const int type, int64_t from, int64_t to) {
  const int64_t in = job->w->in, rows = job->rows, size = type == F32 ? 4 : 2;
  float *sums = scratch(4, sizeof(float) * 16 * GROUP * DEEP_STRIP);
  for (int64_t begin = from, end; begin < to; begin = end) {
    end = begin + DEEP_STRIP < to ? begin + DEEP_STRIP : to;
    for (int64_t first = 0; first < rows; first += GROUP) {
      const int64_t behind = first + GROUP < rows ? first + GROUP : rows, passes = (behind - first + TALL - 1) / TALL;
      for (int64_t k = 0, stop; k < in; k = stop) {
        stop = k + DEPTH < in ? k + DEPTH : in;
        /* what is read next: the next block of the same outputs, or of the next ones; or the next strip, line after line */
        const int64_t at = OUTPUTS > 1 ? end * in + (end - begin) * k : stop < in ? begin * in + stop : end * in;
        const char *ahead = (const char *)job->w->w + at * size;
        int pass = 0;
        for (int64_t row = first; row < behind; row += TALL, pass++) {
          const Next next = OUTPUTS == 1 ? (Next){ahead, 1, 64, 0} : first ? (Next){0} : share_of(ahead, (end - begin) * (stop - k) * size, pass, passes);
          float *at = sums + (row - first) * DEEP_STRIP * 16;
          NEXT_TILE(behind - row, TALL, outputs_of, job, type, row, begin, end, next, k, stop, at)
        }
      }
    }
  }
}
#define TILE_SINGLE(row, o) single(job, type, row, o, 0, job->w->in, 0)
#define TILE(row, o, apart, r, c, next) tile(job, type, row, o, apart, r, c, next, 0, job->w->in, 0)
IN void plain(const Job *job, int64_t from, int64_t to, const int type) {
  const int64_t line = job->w->in * (type == F32 ? 4 : 2);
  if (job->rows == 1 && job->runs) one(job, type, from, to, IN_RUNS);
  else if (job->rows == 1 && line > PAGE) one(job, type, from, to, LONG_ROWS);
  else if (job->rows == 1) one(job, type, from, to, SIDE_BY_SIDE);
  else if (is_transposed(job)) outputs_transposed(job, from, to);
  else if (is_deep(job)) deep(job, type, from, to);
  else ALL_ROWS(TILE, line)
}

static void outputs(void *p, int number) {
  const Job *job = p; /* products of the same x stand one after the other */
  for (; number >= job->pieces; job++) number -= job->pieces;
  const int64_t out = job->w->out, from = number * job->block, to = from + job->block < out ? from + job->block : out;
  if (job->w->form == CODES8) codes8(job, from, to);
  else if (job->w->form >= BLOCKS4) blocks(job, from, to);
  else if (job->w->type == F32) plain(job, from, to, F32);
  else if (job->w->type == F16) plain(job, from, to, F16);
  else plain_bf16(job, from, to);
}

/* -- rows in the form that a product reads -------------------------------------------------------------------------- */

void widen(void *p, int row) {
  const Job *job = p;
  float *x = (float *)job->x + row * job->width;
  for (int64_t k = 0; k < job->width; k += 16) keep(x, k, job->width - k, row_part(job, row, k), F32);
}
/* x in the form that the product reads; others of the same form and width read the same. */
static void prepare(Job *job) {
  const Weight *w = job->w;
  const int64_t rows = job->rows, whole = (rows + 15) & ~(int64_t)15; /* tiles read 16 rows */
  const int ready = rows * w->in > 1 << 15 ? job->threads : 1;
  job->width = w->in;
  if (w->form >= CODES8) {
    job->width = (w->in + 63) & ~(int64_t)63;
    job->codes = scratch(0, (size_t)(whole * job->width));
    job->largest = scratch(1, sizeof(float) * (size_t)(w->form == CODES8 ? rows : whole * w->in / 16));
    job->total = scratch(2, sizeof(int32_t) * (size_t)(w->form >= BLOCKS4 ? rows * w->in / 16 : rows));
    pieces(w->form == CODES8 ? code8 : code_blocks, job, (int)rows, ready);
    if (HAS_AMX && w->form == CODES8 && rows >= AMX_CODES) prepare_amx_codes(job, ready);
  } else if (w->type == BF16) {
    if (w->form == PLAIN) prepare_bf16(job); /* else in_out_bf16 does */
  } else if (job->type == F32) {
    job->x = job->given;
  } else {
    job->x = scratch(0, sizeof(float) * (size_t)(rows * w->in));
    pieces(widen, job, (int)rows, ready);
  }
  if (w->form == IN_OUT && w->type != BF16) prepare_in_out(job, ready);
  if (w->type != BF16 && is_transposed(job)) pack_transposed(job, ready);
}
/* A piece is 128 KB of the weight, and strips. With one row, which no cache serves, it is 512 KB, and as many for each thread;
   and where several tiles of rows share strips, too, but each thread has six, since one may come late. */
static void cut(Job *job) {
  const Weight *w = job->w;
  const int tiled = HAS_AMX && w->form == CODES8 && job->rows >= AMX_CODES;
  const int together = tiled ? 32 : w->form >= BLOCKS4 ? 16 : 4;
  const int64_t bytes = w->form == CODES8 ? w->in : w->form >= BLOCKS4 ? w->in * (w->form + 1) / 8 : w->in * (w->type == F32 ? 4 : 2);
  int64_t block = (131072 / (bytes ? bytes : 1) + STRIP) / STRIP * STRIP;
  const int shared = w->form >= BLOCKS4 ? job->rows > TALL : OUTPUTS > 1 && job->rows > TALL;
  if (job->rows == 1 || tiled || shared) {
    const int64_t each = w->out * bytes / job->threads, least = job->rows > 1 && each > 65536 ? 6 : 1;
    const int64_t rounds = (each + 524287) / 524288, count = job->threads * (rounds > least ? rounds : least);
    block = ((w->out + count - 1) / count + together - 1) / together * together;
    if (w->form == PLAIN && job->rows * w->in > 1 << 18) block = (block + STRIP - 1) / STRIP * STRIP; /* x is read less often */
  }
  if (is_transposed(job)) block = transposed_outputs();
  const int64_t share = ((w->out + job->threads - 1) / job->threads + together - 1) / together * together;
  job->block = block < share || is_transposed(job) ? block : share < together ? together : share;
  job->pieces = (int)((w->out + job->block - 1) / job->block);
}

/* With 16 registers, codes of several rows and blocks are read as fast in one stream. */
static int in_runs_here(const Weight *w, int64_t rows) { return reads_runs() && (OUTPUTS > 1 || w->form == PLAIN || (w->form == CODES8 && rows == 1)); }

static void some_rows(const Weight *const *w, int32_t count, const void *x, void *y, int64_t rows, int32_t type, int32_t threads) {
  Job jobs[MOST_PRODUCTS], job = {.given = x, .y = y, .type = type, .threads = threads, .rows = rows};
  int64_t work = 0;
  int all_pieces = 0;
  for (int n = 0; n < count; n++) job.y_row += w[n]->out;
  for (int n = 0; n < count; job.first += w[n++]->out) {
    job.w = w[n];
    job.runs = in_runs_here(w[n], rows);
    if (n == 0) prepare(&job);
    jobs[n] = job;
    work += w[n]->in * w[n]->out * rows;
    if (w[n]->form == IN_OUT && w[n]->type == BF16) in_out_bf16(jobs + n);
    else if (w[n]->form == IN_OUT) in_out(jobs + n);
    else cut(jobs + n), all_pieces += jobs[n].pieces;
  }
  if (all_pieces) pieces(outputs, jobs, all_pieces, work < 1 << 15 ? 1 : threads);
}
/* A long prompt is taken in parts of rows, so that x in the form of a product is never large. */
#define ROWS_AT_ONCE 1024
void products(const Weight *const *w, int32_t count, const void *x, void *y, int64_t rows, int32_t type, int32_t threads) {
  if (rows <= 0 || count > MOST_PRODUCTS) return;
  const int64_t parts = (rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE, most = (rows + parts - 1) / parts, size = type == F32 ? 4 : 2;
  int64_t y_row = 0;
  for (int n = 0; n < count; n++) y_row += w[n]->out;
  for (int64_t row = 0; row < rows; row += most)
    some_rows(w, count, (const char *)x + row * w[0]->in * size, (char *)y + row * y_row * size, row + most < rows ? most : rows - row, type, threads);
}
