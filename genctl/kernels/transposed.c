/* y = x W' + bias for float32 and float16 weights [O, I] and many rows: 16 COLUMNS outputs after another are transposed, so that lanes
   are outputs, and each number of x is read once for all of them.

   The bits are those of products.c: chain l adds up the inputs k = l mod 16 in turn, and two chains or sums are added as `tree`
   does it. So all rows pass over one chain after another, 0, 8, 4, 12, 2 and so on, and a sum waits for the other side of the
   tree. What is missing of the last 16 inputs is zero in x and W. */
#include "transposed.h"

#define STEPS 128 /* of a chain, whose weights stay in the first cache while all rows pass */
#define LEVELS 5  /* of the tree */
int is_transposed(const Job *job) {
  return job->w->form == PLAIN && (job->w->type == BF16 ? job->form == TRANSPOSED : may_transpose(job));
}
int64_t transposed_outputs(void) { return 16 * COLUMNS; }

IN int chain_of(int turn) { return (turn & 1) << 3 | (turn & 2) << 1 | (turn & 4) >> 1 | turn >> 3; }
IN int64_t steps_of(const Weight *w) { return (w->in + 15) / 16; }
IN int64_t stop_of(int64_t step, int64_t steps) { /* of a block of a long chain: all are about equal */
  const int64_t blocks = (steps + STEPS - 1) / STEPS, stop = step + (steps + blocks - 1) / blocks;
  return stop < steps ? stop : steps;
}
IN int side_by_side(int64_t steps) { return steps > STEPS / 2 ? 1 : steps > STEPS / 4 ? 2 : 4; } /* short chains in one block */
/* How far chains are apart, in W and x: not all in the same sets of a cache */
IN int64_t w_chain(int64_t steps) { return (steps * COLUMNS + 1) * 16; }
IN int64_t x_chain(const Job *job, int64_t steps) { return steps * job->rows + 16; }

/* Outputs from o on as [16 chains in their turn, steps, 16 COLUMNS] */
IN void transpose_outputs(const Job *job, int64_t o, float *to, const int type) {
  const int64_t in = job->w->in, steps = steps_of(job->w), stride = in * (type == F32 ? 4 : 2), rest = job->w->out - o;
  const char *w = (const char *)job->w->w + o * stride;
  for (int c = 0; c < COLUMNS; c++, w += 16 * stride)
    for (int64_t step = 0; step < steps; step++) {
      const int64_t k = 16 * step, n = in - k < 16 ? in - k : 16;
      F v[16], y[16];
      if (n == 16 && 16 * c + 16 <= rest) {
        UNROLL for (int i = 0; i < 16; i++) v[i] = load(w + i * stride, k, type);
      } else {
        for (int i = 0; i < 16; i++) v[i] = 16 * c + i < rest ? loadn(w + i * stride, k, type, (int)n) : all(0);
      }
      transpose16(v, y);
      UNROLL for (int turn = 0; turn < 16; turn++) st(to + turn * w_chain(steps) + (step * COLUMNS + c) * 16, y[chain_of(turn)]);
    }
}
/* x in tile order: of a block of steps all rows, number after number of a tile's rows */
IN void pack(const Job *job, int64_t row, const int r) {
  const int64_t in = job->w->in, steps = steps_of(job->w);
  const int beside = side_by_side(steps);
  const float *x = job->x + row * in;
  for (int64_t begin = 0, stop; begin < steps; begin = stop) {
    stop = stop_of(begin, steps);
    float *to = (float *)job->packed + begin * job->rows + row * (stop - begin) * beside;
    for (int64_t step = begin; step < stop; step++, to += r) {
      const int64_t k = 16 * step, n = in - k;
      F v[16], y[16];
      UNROLL for (int i = 0; i < 16; i++) v[i] = i >= r ? all(0) : n >= 16 ? ld(x + i * in + k) : ldn(x + i * in + k, (int)n);
      transpose16(v, y);
      UNROLL for (int turn = 0; turn < 16; turn++)
        stn(to + turn / beside * beside * x_chain(job, steps) + turn % beside * steps * r, y[chain_of(turn)], r);
    }
  }
}

typedef struct {
  int64_t o, step, stop, steps, first; /* outputs from o on; steps [step, stop) of each chain; rows from `first` on */
  int turn, beside;                    /* chains of a block */
  const float *w;
  float *sums; /* [LEVELS, GROUP, 16 COLUMNS] */
} Transposed;
/* What waits at a level of the tree; for another chain of the same block only one tile's does */
IN float *waiting(const Transposed *a, int level, int64_t row) {
  return a->sums + (level * GROUP + (1 << level < a->beside ? 0 : row - a->first)) * 16 * COLUMNS;
}
IN void tile(const Job *job, const Transposed *a, int64_t row, const int r) {
  const int64_t taken = a->stop - a->step, wide = job->w->out - a->o;
  const float *w = a->w, *x = job->packed + a->turn * x_chain(job, a->steps) + a->step * job->rows + row * taken * a->beside;
  for (int turn = a->turn; turn < a->turn + a->beside; turn++, w += w_chain(a->steps)) {
    const int level = __builtin_ctz(~(unsigned)turn);
    float *sums = waiting(a, level, row);
    F s[TALL][C];
    EACH_SUM(r, 0, COLUMNS) s[i][j] = a->step ? ld(sums + (i * COLUMNS + j) * 16) : all(0);
    x = chain(s, w, 16 * COLUMNS, x, taken, r, 0, COLUMNS);
    for (int side = 0; side < level && a->stop == a->steps; side++) {
      const float *other = waiting(a, side, row);
      EACH_SUM(r, 0, COLUMNS) s[i][j] = add(ld(other + (i * COLUMNS + j) * 16), s[i][j]);
    }
    EACH_SUM(r, 0, COLUMNS) {
      if (turn < 15 || a->stop < a->steps) st(sums + (i * COLUMNS + j) * 16, s[i][j]);
      else if (wide > 16 * j) put16(job, row + i, a->o + 16 * j, wide - 16 * j, s[i][j]);
    }
  }
}
PACK_TILE(pack)
void pack_transposed(Job *job, int threads) {
  job->packed = scratch(1, sizeof(float) * (size_t)(16 * x_chain(job, steps_of(job->w))));
  pieces(pack_tile, job, (int)((job->rows + TALL - 1) / TALL), threads);
}
void outputs_transposed(const Job *job, int64_t from, int64_t to) {
  const Weight *weight = job->w;
  const int64_t steps = steps_of(weight), stride = weight->in * (weight->type == F32 ? 4 : 2), transposed = 16 * w_chain(steps);
  float *w = scratch(4, sizeof(float) * (size_t)(transposed + LEVELS * GROUP * 16 * COLUMNS));
  Transposed a = {.steps = steps, .beside = side_by_side(steps), .sums = w + transposed};
  const int64_t tiles = (job->rows + TALL - 1) / TALL * 16 / a.beside * ((steps + STEPS - 1) / STEPS);
  for (a.o = from; a.o < to; a.o += 16 * COLUMNS) {
    if (weight->type == F32) transpose_outputs(job, a.o, w, F32);
    else transpose_outputs(job, a.o, w, F16);
    Asked asked = ask_after(job, a.o, from, to, stride, tiles);
    for (a.first = 0; a.first < job->rows; a.first += GROUP)
      for (a.turn = 0; a.turn < 16; a.turn += a.beside)
        for (a.step = 0; a.step < steps; a.step = a.stop) {
          a.stop = stop_of(a.step, steps);
          a.w = w + a.turn * w_chain(steps) + a.step * 16 * COLUMNS;
          for (int64_t row = a.first; row < job->rows && row < a.first + GROUP; row += TALL) {
            ask_share(&asked);
            NEXT_TILE(job->rows - row, TALL, tile, job, &a, row)
          }
        }
  }
}
