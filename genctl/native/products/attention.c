/* Attention over a cache. Each query is computed as if it were alone: the columns that it sees are taken in their order,
   whatever lies between them, so that padding, neighbours, the tokens fed together and where a prompt is stored change no
   bit. A score is a sum over D in 16 lanes; the sum of exponentials runs over 16 lanes of columns; values are added up
   column by column. Four queries that see the same column read it once. */
#include "lanes.h"
#include "products.h"

#define QUERIES 4
#define FEW 8     /* tokens fed to a row: more of them read its columns often */
#define ASKED 512 /* the most columns that are asked for ahead */
#if defined(__AVX512F__)
#define WIDE 4 /* times 16 numbers of a value whose sums stay in registers, for each of four queries */
#else
#define WIDE 1
#endif

typedef struct {
  const char **k, **v; /* of each column that is there: where its key and its value begin */
  int32_t *column;
  int64_t count;
} Seen;
typedef struct {
  int64_t row, token, head, from, to; /* columns [from, to) of the row's `Seen` */
  const Seen *seen;
  float *q, *scores, *y; /* scores of columns, from number 0 on */
} Query;

IN void score1(const Query *a, int64_t j, const int64_t size, const int type, const float scaling) { /* four columns */
  const char *const *k = a->seen->k + j;
  F s0 = all(0), s1 = s0, s2 = s0, s3 = s0;
  int64_t d = 0;
  for (; d + 16 <= size; d += 16) {
    F q = ld(a->q + d);
    s0 = fma16(q, load(k[0], d, type), s0);
    s1 = fma16(q, load(k[1], d, type), s1);
    s2 = fma16(q, load(k[2], d, type), s2);
    s3 = fma16(q, load(k[3], d, type), s3);
  }
  if (d < size) {
    const int n = (int)(size - d);
    F q = ldn(a->q + d, n);
    s0 = fma16(q, loadn(k[0], d, type, n), s0);
    s1 = fma16(q, loadn(k[1], d, type, n), s1);
    s2 = fma16(q, loadn(k[2], d, type, n), s2);
    s3 = fma16(q, loadn(k[3], d, type, n), s3);
  }
  float y[4];
  tree4(s0, s1, s2, s3, y);
  for (int i = 0; i < 4; i++) a->scores[j + i] = y[i] * scaling;
}
IN float score(const float *q, const char *k, const int64_t size, const int type) {
  F s = all(0);
  int64_t d = 0;
  for (; d + 16 <= size; d += 16) s = fma16(ld(q + d), load(k, d, type), s);
  if (d < size) s = fma16(ldn(q + d, (int)(size - d)), loadn(k, d, type, (int)(size - d)), s);
  return tree(s);
}
IN void score4(const Query *a, int64_t j, const int64_t size, const int type, const float scaling) { /* four queries */
  const char *k = a->seen->k[j];
  F s0 = all(0), s1 = s0, s2 = s0, s3 = s0;
  int64_t d = 0;
  for (; d + 16 <= size; d += 16) {
    F u = load(k, d, type);
    s0 = fma16(ld(a[0].q + d), u, s0);
    s1 = fma16(ld(a[1].q + d), u, s1);
    s2 = fma16(ld(a[2].q + d), u, s2);
    s3 = fma16(ld(a[3].q + d), u, s3);
  }
  if (d < size) {
    const int n = (int)(size - d);
    F u = loadn(k, d, type, n);
    s0 = fma16(ldn(a[0].q + d, n), u, s0);
    s1 = fma16(ldn(a[1].q + d, n), u, s1);
    s2 = fma16(ldn(a[2].q + d, n), u, s2);
    s3 = fma16(ldn(a[3].q + d, n), u, s3);
  }
  float y[4];
  tree4(s0, s1, s2, s3, y);
  for (int i = 0; i < 4; i++) a[i].scores[j] = y[i] * scaling;
}
IN void score16(const Query *a, int64_t j, const int64_t size, const int type, const float scaling) { /* four queries, four columns */
  const char *const *k = a->seen->k + j;
  F s[16]; /* columns, queries */
  UNROLL for (int i = 0; i < 16; i++) s[i] = all(0);
  for (int64_t d = 0; d < size; d += 16) {
    const int n = size - d < 16 ? (int)(size - d) : 16;
    F u[4];
    UNROLL for (int c = 0; c < 4; c++) u[c] = n == 16 ? load(k[c], d, type) : loadn(k[c], d, type, n);
    UNROLL for (int i = 0; i < 4; i++) {
      const F q = n == 16 ? ld(a[i].q + d) : ldn(a[i].q + d, n);
      UNROLL for (int c = 0; c < 4; c++) s[4 * c + i] = fma16(q, u[c], s[4 * c + i]);
    }
  }
  float y[16];
  tree16(s, y);
  for (int i = 0; i < 4; i++) for (int c = 0; c < 4; c++) a[i].scores[j + c] = y[4 * i + c] * scaling;
}

/* y += p v over columns [from, to), of `n` queries that read the same columns */
IN void mix(const Query *a, const int n, int64_t from, int64_t to, const int64_t size, const int type) {
  const char *const *v = a->seen->v;
  int64_t d = 0;
  for (; d + 16 * WIDE <= size; d += 16 * WIDE) {
    F s[QUERIES][WIDE];
    UNROLL for (int i = 0; i < n; i++) UNROLL for (int c = 0; c < WIDE; c++) s[i][c] = ld(a[i].y + d + 16 * c);
    for (int64_t j = from; j < to; j++) {
      F u[WIDE];
      UNROLL for (int c = 0; c < WIDE; c++) u[c] = load(v[j], d + 16 * c, type);
      UNROLL for (int i = 0; i < n; i++) {
        F p = all(a[i].scores[j]);
        UNROLL for (int c = 0; c < WIDE; c++) s[i][c] = fma16(p, u[c], s[i][c]);
      }
    }
    UNROLL for (int i = 0; i < n; i++) UNROLL for (int c = 0; c < WIDE; c++) st(a[i].y + d + 16 * c, s[i][c]);
  }
  for (; d < size; d += 16) { /* y has room for 16 numbers more */
    const int some = size - d < 16 ? (int)(size - d) : 16;
    F s[QUERIES];
    UNROLL for (int i = 0; i < n; i++) s[i] = ld(a[i].y + d);
    for (int64_t j = from; j < to; j++) {
      F u = some == 16 ? load(v[j], d, type) : loadn(v[j], d, type, some);
      UNROLL for (int i = 0; i < n; i++) s[i] = fma16(all(a[i].scores[j]), u, s[i]);
    }
    UNROLL for (int i = 0; i < n; i++) st(a[i].y + d, s[i]);
  }
}

static void bend(const Attention *a, const Query *q) { /* what some families do to their scores */
  for (int64_t j = q->from; j < q->to && a->softcap != 0; j += 16) {
    const int n = q->to - j < 16 ? (int)(q->to - j) : 16;
    F s = ldn(q->scores + j, n);
    stn(q->scores + j, mul(tanh16(over(s, all(a->softcap))), all(a->softcap)), n);
  }
  if (!a->bias) return;
  const float *bias = a->bias + q->row * a->bias_row + q->head * a->bias_head + q->token * a->bias_token;
  for (int64_t j = q->from; j < q->to; j++) q->scores[j] += bias[q->seen->column[j]];
}
/* scores -> their exponentials; returns the sum */
static float exponentials(float *scores, int64_t from, int64_t to) {
  float m = -INFINITY;
  F top = all(m), sum = all(0);
  int64_t j = from;
  for (; j + 16 <= to; j += 16) {
    F s = ld(scores + j);
    top = below(top, s, s, top);
  }
  float h[16];
  st(h, top);
  for (int l = 0; l < 16; l++) m = h[l] > m ? h[l] : m;
  for (; j < to; j++) m = scores[j] > m ? scores[j] : m;
  for (j = from; j + 16 <= to; j += 16) {
    F e = exp16(sub(ld(scores + j), all(m)));
    st(scores + j, e);
    sum = add(sum, e);
  }
  if (j < to) {
    for (int l = 0; l < 16; l++) h[l] = l < to - j ? scores[j + l] : -INFINITY;
    F e = exp16(sub(ld(h), all(m)));
    stn(scores + j, e, (int)(to - j));
    sum = add(sum, e);
  }
  return tree(sum);
}

static void see(const Attention *a, int64_t row, int64_t head, int64_t end, Seen *seen) { /* columns before `end` */
  const int64_t size = a->type == F32 ? 4 : 2, source = row / a->each;
  /* keys and values of few queries come from memory, in pieces too short for the CPU to foresee them */
  const int64_t asked = a->fed > FEW ? 0 : ASKED;
  int64_t column = 0;
  seen->count = 0;
  for (int part = 0; part < 2; part++) {
    const char *k = (const char *)a->k[part] + (source * a->k_row[part] + head * a->k_head[part]) * size;
    const char *v = (const char *)a->v[part] + (source * a->v_row[part] + head * a->v_head[part]) * size;
    for (int64_t c = 0; c < a->columns[part] && column < end; c++, column++) {
      if (a->mask && !a->mask[row * a->mask_row + column]) continue;
      seen->k[seen->count] = k + c * a->k_column[part] * size;
      seen->v[seen->count] = v + c * a->v_column[part] * size;
      for (int64_t at = 0; seen->count < asked && at < a->size * size; at += 64) {
        __builtin_prefetch(seen->k[seen->count] + at, 0, 2);
        __builtin_prefetch(seen->v[seen->count] + at, 0, 2);
      }
      seen->column[seen->count++] = (int32_t)column;
    }
  }
}
static int64_t first_not_below(const Seen *seen, int64_t column) {
  int64_t low = 0, high = seen->count;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (seen->column[middle] < column) low = middle + 1;
    else high = middle;
  }
  return low;
}

IN void attend(const Attention *a, Query *q, const int n, const int type) {
  const int64_t size = a->size;
  /* columns that all the queries see, and at the same place: each row has its own, but for a prompt that rows share */
  int64_t from = q[0].from, to = q[0].to;
  for (int i = 1; i < n; i++) {
    from = q[i].from > from ? q[i].from : from;
    to = q[i].to < to ? q[i].to : to;
    if (q[i].seen == q[0].seen) continue;
    int64_t same = from; /* places are equal up to somewhere, and different from there on */
    while (same < to && q[i].seen->k[same] == q[0].seen->k[same] && q[i].seen->v[same] == q[0].seen->v[same]) same++;
    to = same;
  }
  if (n < QUERIES || to <= from) from = to = 0;
  int64_t j = from;
  if (WIDE == 4) /* where registers hold that many sums */
    for (; j + 4 <= to; j += 4) score16(q, j, size, type, a->scaling);
  for (; j < to; j++) score4(q, j, size, type, a->scaling);
  for (int i = 0; i < n; i++) {
    const int64_t ends[2][2] = {{q[i].from, to > from ? from : q[i].to}, {to > from ? to : q[i].to, q[i].to}};
    for (int end = 0; end < 2; end++) {
      int64_t j = ends[end][0];
      for (; j + 4 <= ends[end][1]; j += 4) score1(q + i, j, size, type, a->scaling);
      for (; j < ends[end][1]; j++) q[i].scores[j] = score(q[i].q, q[i].seen->k[j], size, type) * a->scaling;
    }
    bend(a, q + i);
  }
  float sums[QUERIES];
  for (int i = 0; i < n; i++) {
    sums[i] = exponentials(q[i].scores, q[i].from, q[i].to);
    memset(q[i].y, 0, sizeof(float) * (size_t)(size + 16));
    mix(q + i, 1, q[i].from, to > from ? from : q[i].to, size, type);
  }
  if (to > from) {
    mix(q, QUERIES, from, to, size, type);
    for (int i = 0; i < n; i++) mix(q + i, 1, to, q[i].to, size, type);
  }
  for (int i = 0; i < n; i++) {
    const int64_t at = ((q[i].row * a->fed + q[i].token) * a->heads + q[i].head) * size;
    for (int64_t d = 0; d < size; d++) {
      const float y = q[i].to > q[i].from ? q[i].y[d] / sums[i] : 0; /* padding sees nothing */
      if (type == F32) ((float *)a->y)[at + d] = y;
      else ((uint16_t *)a->y)[at + d] = type == BF16 ? to_bf16(y) : to_f16(y);
    }
  }
}

static void block(const Attention *a, int64_t number) {
  const int64_t group = a->heads / a->kv_heads, queries = a->rows * a->fed * group, blocks = (queries + QUERIES - 1) / QUERIES;
  const int64_t head = number / blocks, first = number % blocks * QUERIES, total = a->columns[0] + a->columns[1];
  const int n = queries - first < QUERIES ? (int)(queries - first) : QUERIES;
  const int64_t room = (total + 31) & ~(int64_t)15, numbers = (a->size + 31) & ~(int64_t)15;
  char *memory = scratch(3, (size_t)(QUERIES * (room * (2 * sizeof(char *) + sizeof(int32_t) + sizeof(float)) + numbers * 2 * sizeof(float))));
  Seen seen[QUERIES];
  Query q[QUERIES];
  int rows = 0;
  for (int i = 0; i < QUERIES; i++) {
    seen[i].k = (const char **)memory + (2 * i) * room;
    seen[i].v = seen[i].k + room;
  }
  memory += QUERIES * room * 2 * (int64_t)sizeof(char *);
  for (int i = 0; i < QUERIES; i++, memory += room * (int64_t)sizeof(int32_t)) seen[i].column = (int32_t *)memory;
  for (int i = 0; i < n; i++) {
    const int64_t at = first + i;
    Query *one = q + i;
    one->row = at / (a->fed * group);
    one->token = at / group % a->fed;
    one->head = head * group + at % group;
    one->scores = (float *)memory + i * (room + 2 * numbers);
    one->q = one->scores + room;
    one->y = one->q + numbers;
    if (i == 0 || one->row != q[i - 1].row) { /* what the last query of this row sees */
      const int64_t behind = (one->row + 1) * a->fed * group, last = (first + n < behind ? first + n : behind) - 1;
      see(a, one->row, head, a->causal ? total - a->fed + last / group % a->fed + 1 : total, seen + rows++);
    }
    one->seen = seen + rows - 1;
    const int64_t end = a->causal ? total - a->fed + one->token + 1 : total, begin = a->window && end > a->window ? end - a->window : 0;
    one->from = begin ? first_not_below(one->seen, begin) : 0;
    one->to = end < total ? first_not_below(one->seen, end) : one->seen->count;
    const int64_t place = one->row * a->q_row + one->head * a->q_head + one->token * a->q_token;
    for (int64_t d = 0; d < a->size; d++)
      one->q[d] = a->type == F32 ? ((const float *)a->q)[place + d] : a->type == BF16 ? from_bf16(((const uint16_t *)a->q)[place + d]) : from_f16(((const uint16_t *)a->q)[place + d]);
  }
  switch (a->type) {
  case F32: attend(a, q, n, F32); break;
  case BF16: attend(a, q, n, BF16); break;
  default: attend(a, q, n, F16);
  }
}

typedef struct {
  const Attention *a;
  int64_t count, each; /* blocks; of them, of a piece */
} Blocks;
static void some_blocks(void *p, int number) {
  const Blocks *b = p;
  const int64_t first = number * b->each, behind = first + b->each < b->count ? first + b->each : b->count;
  for (int64_t n = first; n < behind; n++) block(b->a, n);
}
void attention(const Attention *a, int32_t threads) {
  if (a->rows * a->fed == 0) return;
  const int64_t queries = a->rows * a->fed * (a->heads / a->kv_heads), blocks = (queries + QUERIES - 1) / QUERIES;
  const int64_t work = queries * a->kv_heads * (a->columns[0] + a->columns[1]) * a->size;
  /* few queries: those that share a prompt read its keys and values one after the other, and from the cache */
  Blocks all_blocks = {a, a->kv_heads * blocks, queries <= 32 && a->kv_heads >= 2 * threads ? blocks : 1};
  pieces(some_blocks, &all_blocks, (int)((all_blocks.count + all_blocks.each - 1) / all_blocks.each), work < 1 << 14 ? 1 : threads);
}
