/* y = x W + bias for float32 and float16 weights [I, O] as they lie.

   The inputs are cut into at most PARTS parts; a part is one chain; the parts are added in turn. */
#include "in_out.h"

#define PARTS 8
/* FEW: rows up to which whole rows of a weight are read; more: tiles. SUMS: of all rows, that stay in the cache while the inputs
   of a part pass; ROOM: that a thread adds up from part to part, in the second cache. */
#if defined(__AVX512F__) || defined(__AVX2__)
#define FEW 32
#else
#define FEW 10
#endif
#if defined(__AVX512F__)
#define SUMS(rows) 32768
#define ROOM 65536
#define INPUTS 8 /* whose weights are in registers while the few rows pass */
#else
#define SUMS(rows) ((rows) > 8 ? 4096 : 8192)
#define ROOM 32768
#define INPUTS 4
#endif
#define WHOLE 16 /* rows up to which a thread has parts, if there are TRAVEL inputs for each */
#define TRAVEL 150
#define LEAST 128 /* columns of a thread: with fewer, threads have parts of the inputs */
#define BROAD 512 /* the most strips of a piece, times rows: sums stay in the second cache */
#define EVEN 192 /* rows from which on each tile asks for its share of the next block; with fewer the first two tiles do */

/* A part of the inputs for some columns and few rows, whose sums lie in the first cache: W is read along its rows. The numbers of
   `one` row stay in registers. */
IN void along(const Job *job, const int type, int64_t k, const int64_t stop, int64_t o, int64_t n, float *sums, const int64_t step, const int deep, const int one) {
  const int64_t in = job->w->in, size = type == F32 ? 4 : 2, stride = job->w->out * size;
  for (; k + deep <= stop; k += deep) {
    const char *w = (const char *)job->w->w + k * stride + o * size;
    F u[INPUTS], v[INPUTS];
    if (one) UNROLL for (int d = 0; d < deep; d++) u[d] = all(job->x[k + d]);
    for (int64_t c = 0; c < n; c += 16) {
      if (n - c >= 16) {
        const char *ahead = w + deep * stride + c * size;
        UNROLL for (int d = 0; d < deep; d++, ahead += stride) {
          __asm__("" : "+r"(ahead)); /* one address, not one for each input: there are too few registers for them */
          __builtin_prefetch(ahead, 0, 2);
          v[d] = load(w + d * stride, c, type);
        }
      } else UNROLL for (int d = 0; d < deep; d++) v[d] = loadn(w + d * stride, c, type, (int)(n - c));
      for (int64_t i = 0; i < (one ? 1 : job->rows); i++) {
        float *to = sums + i * step + c;
        const float *x = job->x + i * in + k;
        F s = ld(to);
        UNROLL for (int d = 0; d < deep; d++) s = fma16(one ? u[d] : all(x[d]), v[d], s);
        st(to, s);
      }
    }
  }
}
static void part_of(const Job *job, int part, int64_t o, int64_t n, float *sums, int64_t step) {
  const int64_t k = part * job->length, in = job->w->in, stop = k + job->length < in ? k + job->length : in;
  const int64_t whole_stop = k + (stop - k) / INPUTS * INPUTS;
  for (int64_t i = 0; i < job->rows; i++) memset(sums + i * step, 0, sizeof(float) * (size_t)((n + 15) & ~(int64_t)15));
#define ALONG(type, one) along(job, type, k, whole_stop, o, n, sums, step, INPUTS, one), along(job, type, whole_stop, stop, o, n, sums, step, 1, one)
  if (job->w->type == F32 && job->rows == 1) ALONG(F32, 1);
  else if (job->w->type == F32) ALONG(F32, 0);
  else if (job->rows == 1) ALONG(F16, 1);
  else ALONG(F16, 0);
}
/* All parts of some columns: one block of them after another, whose sums are added to those of the parts before. */
static void few_columns(void *p, int number) {
  const Job *job = p;
  const int64_t from = number * job->block, rest = job->w->out - from, columns = rest < job->block ? rest : job->block;
  const int64_t rows = job->rows, most = SUMS(rows) / rows / 64 * 64, width = most < job->block ? most : job->block;
  const int64_t step = width + 32, total_step = SUMS_ROW(job);
  float *sums = scratch(4, sizeof(float) * (size_t)(rows * (step + total_step))), *total = sums + rows * step;
  for (int part = 0; part < job->count; part++)
    for (int64_t first = 0; first < columns; first += width) {
      const int64_t n = columns - first < width ? columns - first : width;
      part_of(job, part, from + first, n, sums, step);
      for (int64_t i = 0; i < rows; i++)
        for (int64_t o = 0; o < n; o += 16) {
          float *to = total + i * total_step + first + o;
          const F s = add(part ? ld(to) : all(0), ld(sums + i * step + o));
          if (part + 1 < job->count) st(to, s);
          else put16(job, i, from + first + o, n - o, s);
        }
    }
}
/* Some columns of a group of parts. The first group adds up its own; sums of the others wait for sum_parts, so that the parts
   are added in turn. They are made in a thread's own memory: to make them where another thread has just read takes longer. */
static void few_in_out(void *p, int number) {
  const Job *job = p;
  const int64_t out = job->w->out, blocks = (out + job->block - 1) / job->block, block = number % blocks, o = block * job->block;
  const int64_t n = out - o < job->block ? out - o : job->block, step = SUMS_ROW(job);
  const int parts = job->count + job->group - 1, first = (int)(number / blocks) * job->group;
  const int stop = first + job->group < parts ? first + job->group : parts;
  float *sums = scratch(4, sizeof(float) * (size_t)(2 * job->rows * step)), *total = sums + job->rows * step;
  for (int part = first; part < stop; part++) {
    part_of(job, part, o, n, sums, step);
    float *to = first ? sums_of(job, block, part - job->group + 1) : part + 1 < stop ? total : sums_of(job, block, 0);
    for (int64_t i = 0; i < job->rows; i++)
      for (int64_t c = 0; c < n; c += 16) {
        const F s = ld(sums + i * step + c);
        st(to + i * step + c, first || !part ? s : add(ld(total + i * step + c), s));
      }
  }
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
/* Many rows: the first tile reads W as it lies, where each row may be another page and all rows the same set of the first cache,
   and leaves `copy` to the others. Tiles ask for the next block, so that memory is not idle while they compute: all strips of a
   piece in turn ask along its rows, so that a page is looked up once. */
IN void ask_evenly(const Job *job, const InOut *a, const int64_t size, int64_t row, int64_t r) { /* these rows' share of the lines */
  const int64_t out = job->w->out, each = C * size / 4, lines = (a->stop - a->k) * each, from = a->strip * (a->stop - a->k);
  const char *next = (const char *)job->w->w + ((a->k + a->depth) * out + a->o - a->strip * 16 * C) * size;
  for (int64_t line = lines * row / job->rows; line < lines * (row + r) / job->rows; line++) {
    const int64_t at = from + line / each;
    __builtin_prefetch(next + (at / a->strips * out + at % a->strips * 16 * C) * size + line % each * 64, 0, 2);
  }
}
/* r rows by columns 16 [begin, end), of 16 C */
IN void tile_in_out(const Job *job, const InOut *a, const int type, int64_t row, const int r, const int begin, const int end, const int tile) {
  const int64_t in = job->w->in, out = job->w->out, size = type == F32 ? 4 : 2, wide = out - a->o;
  const char *w = (const char *)job->w->w + (a->k * out + a->o) * size;
  const float *x = job->packed + a->k * job->rows + row * (a->stop - a->k);
  F s[TALL][C], v[C];
  EACH_SUM(r, begin, end) s[i][j] = a->k == a->part ? all(0) : ld(a->sums + ((row + i) * C + j) * 16);
  float *copy = a->copy;
  const int64_t asked = a->strip * (a->stop - a->k); /* by the strips before */
  const int early = tile < 2 && job->rows < EVEN;
  int64_t next = asked % a->strips;
  const char *ahead = w + ((a->depth + asked / a->strips) * out - a->strip * 16 * C) * size;
  if (begin == 0 && job->rows >= EVEN) ask_evenly(job, a, size, row, r);
  for (int64_t k = a->k; k < a->stop; k++, w += out * size, copy += 16 * C, x += r) {
    UNROLL for (int j = begin; j < end; j++) {
      if (early && tile == j * 2 / C && (type == F32 || !(j & 1))) __builtin_prefetch(ahead + (next * C + j) * 16 * size, 0, 2);
      if (tile) v[j] = ld(copy + 16 * j);
      else {
        v[j] = wide >= 16 * j + 16 ? load(w, 16 * j, type) : wide > 16 * j ? loadn(w, 16 * j, type, (int)(wide - 16 * j)) : all(0);
        st(copy + 16 * j, v[j]);
      }
    }
    __builtin_prefetch(x + X_AHEAD, 0, 3);
    if (early && ++next == a->strips) next = 0, ahead += out * size;
    UNROLL for (int i = 0; i < r; i++) {
      F u = all(x[i]);
      UNROLL for (int j = begin; j < end; j++) s[i][j] = fma16(u, v[j], s[i][j]);
    }
  }
  EACH_SUM(r, begin, end) {
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
IN void rows_in_out(const Job *job, const InOut *a, const int type, int64_t row, const int tile, const int r) {
  if (R == TALL || r <= R) tile_in_out(job, a, type, row, r, 0, C, tile);
  else { /* one half of the columns after the other */
    tile_in_out(job, a, type, row, r, 0, C / 2, 2);
    tile_in_out(job, a, type, row, r, C / 2, C, tile);
  }
}
IN void block_as(const Job *job, const InOut *a, const int type) {
  const int64_t rows = job->rows;
  int64_t row = R;
  tile_in_out(job, a, type, 0, R, 0, C, 0);
  if (rows >= row + TALL) rows_in_out(job, a, type, row, 1, TALL), row += TALL;
  for (; row + TALL <= rows; row += TALL) rows_in_out(job, a, type, row, 2, TALL);
  LAST_TILE(rows - row, TALL, rows_in_out, job, a, type, row, 1)
}
static void block_in_out(const Job *job, const InOut *a) {
  if (job->w->type == F32) block_as(job, a, F32);
  else block_as(job, a, F16);
}
static void many_in_out(void *job, int number) { all_blocks(job, number, block_in_out); }

/* x is packed in tile order, one line after another: of a block of inputs all rows, number after number of a tile's rows */
IN void pack_rows(const Job *job, int64_t row, const int r) {
  const int64_t width = job->width;
  for (int64_t k = 0, stop, part_stop = job->length; k < width; k = stop, part_stop += k < part_stop ? 0 : job->length) {
    stop = stop_of(job, k, part_stop < width ? part_stop : width);
    float *to = (float *)job->packed + k * job->rows + row * (stop - k);
    for (int64_t from = k; from < stop; from += 16) {
      float x[TALL][16];
      UNROLL for (int i = 0; i < r; i++) st(x[i], row_part(job, row + i, from));
      for (int l = 0; l < 16 && from + l < stop; l++) UNROLL for (int i = 0; i < r; i++) *to++ = x[i][l];
    }
  }
}
IN int64_t first_tile(const Job *job) { return job->w->type == BF16 ? TALL : R; }
static void pack(void *p, int tile) {
  const Job *job = p;
  const int64_t row = tile ? first_tile(job) + (int64_t)(tile - 1) * TALL : 0, rest = tile ? job->rows - row : first_tile(job);
  NEXT_TILE(rest, TALL, pack_rows, job, row)
}
void pack_in_out(Job *job, int threads) {
  job->packed = scratch(1, sizeof(float) * (size_t)(job->rows * job->width));
  pieces(pack, job, 1 + (int)((job->rows - first_tile(job) + TALL - 1) / TALL), threads);
}
IN int64_t length_of(const Weight *w) { return ((w->in + PARTS - 1) / PARTS + 7) & ~(int64_t)7; } /* of a part */
void prepare_in_out(Job *job, int threads) {
  if (job->rows <= FEW) return;
  job->length = length_of(job->w);
  pack_in_out(job, threads);
}

void in_out(Job *job) {
  const Weight *w = job->w;
  const int64_t rows = job->rows;
  job->length = length_of(w);
  job->count = (int)((w->in + job->length - 1) / job->length);
  if (rows > FEW) {
    const int64_t strips = (w->out + WIDE - 1) / WIDE, share = strips / (2 * job->threads), most = BROAD / rows;
    job->block = (share < 1 || most < 1 ? 1 : share < most ? share : most) * WIDE;
    pieces(many_in_out, job, (int)((w->out + job->block - 1) / job->block), job->threads);
    return;
  }
  /* A thread has parts, and reads whole rows of W, where sums that travel between threads are few beside W: of one or two rows,
     or many inputs. Else it has columns, but where there are so few of them that it would read crumbs. */
  const int64_t strips = (w->out + 63) / 64, each = (strips + job->threads - 1) / job->threads;
  const int whole = rows > 2 && rows <= WHOLE && rows * TRAVEL <= w->in && job->threads <= PARTS;
  if (rows > 2 && !whole && each * 64 >= LEAST) {
    const int64_t most = ROOM / rows / 64, cuts = (each + most - 1) / most;
    job->block = (each + cuts - 1) / cuts * 64;
    pieces(few_columns, job, (int)((w->out + job->block - 1) / job->block), job->threads);
    return;
  }
  const int64_t shares = whole ? 1 : (2 * job->threads + PARTS - 1) / PARTS; /* two pieces for each thread, or one */
  const int64_t share = ((w->out + shares - 1) / shares + 63) / 64 * 64, most = SUMS(rows) / rows / 64 * 64;
  job->block = share < most || whole ? share : most;
  job->group = whole ? (job->count + job->threads - 1) / job->threads : 1;
  const int64_t blocks = (w->out + job->block - 1) / job->block;
  const int groups = (job->count + job->group - 1) / job->group;
  job->count -= job->group - 1; /* sums of the first group are one */
  job->parts = scratch(1, sizeof(float) * (size_t)(blocks * job->count * rows * SUMS_ROW(job)));
  pieces(few_in_out, job, (int)(groups * blocks), job->threads);
  pieces(sum_parts, job, (int)blocks, rows * w->out > 1 << 14 ? job->threads : 1);
}
