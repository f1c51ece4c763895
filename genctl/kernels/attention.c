/* Attention over a cache. Each query is computed as if it were alone: the columns that it sees are taken in their order,
   whatever lies between them, so that padding, neighbours, the tokens fed together and where a prompt is stored change no
   bit. A score is a sum over D in 16 lanes; the sum of exponentials runs over 16 lanes of columns; values are added up
   column by column. Four queries that see the same column read it once. */
#include "lanes.h"
#include "products.h"

#define QUERIES 4
#define MOST 64      /* queries of a block, where a row has that many: they share the list of what is seen */
#define SHARED 16    /* queries of a row, from which on a block widens keys and values of 16 bits once... */
#define WIDENED 2048 /* ...if there are at most so many columns, which stay in the second cache */
#define FEW 8        /* tokens fed to a row: more of them read its columns often */
#define ASKED 512    /* the most columns that are asked for ahead */
#if defined(__AVX512F__)
#define WIDE 4 /* times 16 numbers of a value whose sums stay in registers, for each of four queries */
#else
#define WIDE 1
#endif

typedef struct {
  const char **k, **v; /* of each column that is there: where its key and its value begin */
  int32_t *column;
  int64_t count, alike; /* columns; of them, the first ones that are those of the list before */
} Seen;
/* The lists of as many rows as four queries may have, and of the row before them */
#define LISTS (QUERIES + 1)
typedef struct {
  int64_t row, token, head, from, to; /* columns [from, to) of the row's `Seen` */
  const Seen *seen;
  float *q, *scores, *y; /* scores of columns, from number 0 on */
} Query;

/* Of so many queries, 1 or 4, and so many columns, 1 or 4, from number j on */
IN void scores(const Query *a, int64_t j, const int queries, const int columns, const int64_t size, const int type, const float scaling) {
  const char *const *k = a->seen->k + j;
  F s[16], u[4]; /* columns, queries */
  UNROLL for (int n = 0; n < queries * columns; n++) s[n] = all(0);
#define ADD_PRODUCTS(load, ...) \
  { \
    UNROLL for (int c = 0; c < columns; c++) u[c] = load(k[c], d, type, ##__VA_ARGS__); \
    UNROLL for (int i = 0; i < queries; i++) UNROLL for (int c = 0; c < columns; c++) \
      s[c * queries + i] = fma16(load(a[i].q, d, F32, ##__VA_ARGS__), u[c], s[c * queries + i]); \
  }
  int64_t d = 0;
  for (; d + 16 <= size; d += 16) ADD_PRODUCTS(load)
  if (d < size) ADD_PRODUCTS(loadn, (int)(size - d))
  float y[16]; /* queries, columns */
  if (queries * columns == 16) tree16(s, y);
  else if (queries * columns == 4) tree4(s[0], s[1], s[2], s[3], y);
  else y[0] = tree(s[0]);
  UNROLL for (int i = 0; i < queries; i++) UNROLL for (int c = 0; c < columns; c++) a[i].scores[j + c] = y[i * columns + c] * scaling;
}

/* y += p v over columns [from, to), of `n` queries that read the same columns: 16 `wide` numbers from d on, or `some`. There is room
   for 16 numbers more behind y. */
IN void mix_some(const Query *a, const int n, int64_t from, int64_t to, int64_t d, const int wide, const int64_t some, const int type) {
  F s[QUERIES][WIDE], u[WIDE];
  UNROLL for (int i = 0; i < n; i++) UNROLL for (int c = 0; c < wide; c++) s[i][c] = ld(a[i].y + d + 16 * c);
  for (int64_t j = from; j < to; j++) {
    UNROLL for (int c = 0; c < wide; c++) u[c] = part(a->seen->v[j], d + 16 * c, some, type);
    UNROLL for (int i = 0; i < n; i++) {
      const F p = all(a[i].scores[j]);
      UNROLL for (int c = 0; c < wide; c++) s[i][c] = fma16(p, u[c], s[i][c]);
    }
  }
  UNROLL for (int i = 0; i < n; i++) UNROLL for (int c = 0; c < wide; c++) st(a[i].y + d + 16 * c, s[i][c]);
}
IN void mix(const Query *a, const int n, int64_t from, int64_t to, const int64_t size, const int type) {
  int64_t d = 0;
  for (; d + 16 * WIDE <= size; d += 16 * WIDE) mix_some(a, n, from, to, d, WIDE, 16, type);
  for (; d < size; d += 16) mix_some(a, n, from, to, d, 1, size - d, type);
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
/* scores -> their exponentials; returns the sum, with that of a sink or NULL. There is room for 16 more, which become 0. */
static float exponentials(float *scores, int64_t from, int64_t to, const float *sink) {
  F top = all(-INFINITY), sum = all(0);
  st(scores + to, top);
  for (int64_t j = from; j < to; j += 16) {
    const F s = ld(scores + j);
    top = below(top, s, s, top);
  }
  const float mine = highest(top);
  const F most = all(sink && *sink > mine ? *sink : mine);
  for (int64_t j = from; j < to; j += 16) {
    const F e = exp16(sub(ld(scores + j), most));
    st(scores + j, e);
    sum = add(sum, e);
  }
  if (!sink) return tree(sum);
  float h[16];
  st(h, exp16(sub(all(*sink), most)));
  return tree(sum) + h[0];
}

IN void widen_as(const void *from, float *to, int64_t size, const int type) {
  for (int64_t d = 0; d < size; d += 16) keep(to, d, size - d, part(from, d, size - d, type), F32);
}
static const char *widen(const void *from, float *to, int64_t size, int type) {
  FOR_TYPE(type, widen_as, from, to, size)
  return (const char *)to;
}
static int64_t source_of(const Attention *a, int64_t row) { return a->of ? a->of[row] : row / a->each; }
/* Columns before `end`; `wide`: where they are widened to, or NULL; `before`: the list of the row before, with as many columns of
   the first stretch, or NULL. Rows that share a prompt see the same of it, and only the first one asks for it. */
static void see(const Attention *a, int64_t row, int64_t head, int64_t end, float *wide, const Seen *before, Seen *seen) {
  const int64_t size = a->type == F32 ? 4 : 2, source = source_of(a, row);
  /* keys and values of few queries come from memory, in pieces too short for the CPU to foresee them */
  const int64_t asked = a->fed > FEW ? 0 : ASKED;
  const uint8_t *mask = a->mask ? a->mask + row * a->mask_row : NULL;
  int64_t column = 0;
  seen->count = seen->alike = 0;
  const int64_t apart = before ? source - source_of(a, row - 1) : 1; /* from the keys and values of the row before */
  if (!wide && apart * a->k_row[0] == 0 && apart * a->v_row[0] == 0 && end >= a->columns[0] && before && (!mask || !memcmp(mask, mask - a->mask_row, (size_t)a->columns[0]))) {
    column = a->columns[0];
    while (seen->count < before->count && before->column[seen->count] < column) seen->count++;
    seen->alike = seen->count;
    memcpy(seen->k, before->k, sizeof(char *) * (size_t)seen->count);
    memcpy(seen->v, before->v, sizeof(char *) * (size_t)seen->count);
    memcpy(seen->column, before->column, sizeof(int32_t) * (size_t)seen->count);
  }
  for (int part = column > 0; part < 2; part++) {
    const char *k = (const char *)a->k[part] + (source * a->k_row[part] + head * a->k_head[part]) * size;
    const char *v = (const char *)a->v[part] + (source * a->v_row[part] + head * a->v_head[part]) * size;
    for (int64_t c = 0; c < a->columns[part] && column < end; c++, column++) {
      if (mask && !mask[column]) continue;
      seen->k[seen->count] = k + c * a->k_column[part] * size;
      seen->v[seen->count] = v + c * a->v_column[part] * size;
      for (int64_t at = 0; seen->count < asked && at < a->size * size; at += 64) {
        __builtin_prefetch(seen->k[seen->count] + at, 0, 2);
        __builtin_prefetch(seen->v[seen->count] + at, 0, 2);
      }
      if (wide) {
        seen->k[seen->count] = widen(seen->k[seen->count], wide, a->size, a->type);
        seen->v[seen->count] = widen(seen->v[seen->count], wide + a->size, a->size, a->type);
        wide += 2 * a->size;
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
  int64_t from = q[0].from, to = q[0].to, alike = INT64_MAX;
  for (int i = 1; i < n; i++) {
    from = q[i].from > from ? q[i].from : from;
    to = q[i].to < to ? q[i].to : to;
    if (q[i].seen != q[i - 1].seen && q[i].seen->alike < alike) alike = q[i].seen->alike;
    if (q[i].seen == q[0].seen) continue;
    int64_t same = from > alike ? from : alike; /* places are equal up to somewhere, and different from there on */
    while (same < to && q[i].seen->k[same] == q[0].seen->k[same] && q[i].seen->v[same] == q[0].seen->v[same]) same++;
    to = same;
  }
  if (n < QUERIES || to <= from) from = to = 0;
  int64_t j = from;
  if (WIDE == 4) /* where registers hold that many sums */
    for (; j + 4 <= to; j += 4) scores(q, j, QUERIES, 4, size, type, a->scaling);
  for (; j < to; j++) scores(q, j, QUERIES, 1, size, type, a->scaling);
  for (int i = 0; i < n; i++) {
    const int64_t ends[2][2] = {{q[i].from, to > from ? from : q[i].to}, {to > from ? to : q[i].to, q[i].to}};
    for (int end = 0; end < 2; end++) {
      int64_t j = ends[end][0];
      for (; j + 4 <= ends[end][1]; j += 4) scores(q + i, j, 1, 4, size, type, a->scaling);
      for (; j < ends[end][1]; j++) scores(q + i, j, 1, 1, size, type, a->scaling);
    }
    bend(a, q + i);
  }
  float sums[QUERIES];
  for (int i = 0; i < n; i++) {
    sums[i] = exponentials(q[i].scores, q[i].from, q[i].to, a->sinks ? a->sinks + q[i].head : NULL);
    memset(q[i].y, 0, sizeof(float) * (size_t)(size + 16));
    mix(q + i, 1, q[i].from, to > from ? from : q[i].to, size, type);
  }
  if (to > from) {
    mix(q, QUERIES, from, to, size, type);
    for (int i = 0; i < n; i++) mix(q + i, 1, to, q[i].to, size, type);
  }
  for (int i = 0; i < n; i++) {
    const int64_t at = ((q[i].row * a->fed + q[i].token) * a->heads + q[i].head) * size;
    for (int64_t d = 0; d < size; d += 16) st(q[i].y + d, q[i].to > q[i].from ? over(ld(q[i].y + d), all(sums[i])) : all(0)); /* padding sees nothing */
    if (a->type == F32) memcpy((float *)a->y + at, q[i].y, sizeof(float) * (size_t)size);
    else for (int64_t d = 0; d < size; d++) set(a->y, at + d, a->type == BF16 ? BF16 : F16, q[i].y[d]);
  }
}

/* Queries [first, behind) of a head of keys and values, four after four */
static void block(const Attention *a, int64_t head, int64_t first, int64_t behind) {
  const int64_t group = a->heads / a->kv_heads, total = a->columns[0] + a->columns[1];
  const int64_t room = (total + 31) & ~(int64_t)15, numbers = (a->size + 31) & ~(int64_t)15;
  const int widened = a->type != F32 && a->fed * group >= SHARED && behind - first >= SHARED && total <= WIDENED;
  const int64_t list = room * (int64_t)(2 * sizeof(char *) + sizeof(int32_t)) + (widened ? total * 2 * a->size * (int64_t)sizeof(float) : 0);
  const int64_t each = room + 2 * numbers, lines = (list + 63) & ~(int64_t)63;
  char *memory = scratch(3, (size_t)(QUERIES * each * (int64_t)sizeof(float) + LISTS * lines));
  Seen seen[LISTS];
  float *wide[LISTS];
  for (int i = 0; i < LISTS; i++) {
    seen[i].k = (const char **)(memory + i * lines);
    seen[i].v = seen[i].k + room;
    wide[i] = (float *)(seen[i].v + room);
    seen[i].column = (int32_t *)(wide[i] + (widened ? total * 2 * a->size : 0));
  }
  float *numbers_of = (float *)(memory + LISTS * lines);
  int64_t row = -1;
  int now = 0; /* the list of that row */
  for (; first < behind; first += QUERIES) {
    Query q[QUERIES];
    const int n = behind - first < QUERIES ? (int)(behind - first) : QUERIES;
    for (int i = 0; i < n; i++) {
      const int64_t at = first + i;
      Query *one = q + i;
      one->row = at / (a->fed * group);
      one->token = at / group % a->fed;
      one->head = head * group + at % group;
      one->scores = numbers_of + i * each;
      one->q = one->scores + room;
      one->y = one->q + numbers;
      if (one->row != row) { /* what the last query of this row sees */
        const Seen *before = row >= 0 && one->row == row + 1 ? seen + now : NULL;
        row = one->row;
        now = (now + 1) % LISTS;
        const int64_t next = (row + 1) * a->fed * group, last = (behind < next ? behind : next) - 1;
        see(a, row, head, a->causal ? total - a->fed + last / group % a->fed + 1 : total, widened ? wide[now] : NULL, before, seen + now);
      }
      one->seen = seen + now;
      const int64_t end = a->causal ? total - a->fed + one->token + 1 : total, begin = a->window && end > a->window ? end - a->window : 0;
      one->from = begin ? first_not_below(one->seen, begin) : 0;
      one->to = end < total ? first_not_below(one->seen, end) : one->seen->count;
      const int64_t place = row * a->q_row + one->head * a->q_head + one->token * a->q_token;
      widen((const char *)a->q + place * (a->type == F32 ? 4 : 2), one->q, a->size, a->type);
    }
    FOR_TYPE(widened ? F32 : a->type, attend, a, q, n)
  }
}

typedef struct {
  const Attention *a;
  int64_t queries, size; /* of a head of keys; of a block */
} Blocks;
static void one_block(void *p, int number) {
  const Blocks *b = p;
  const int64_t blocks = (b->queries + b->size - 1) / b->size, begin = number % blocks * b->size;
  block(b->a, number / blocks, begin, begin + b->size < b->queries ? begin + b->size : b->queries);
}
void attention(const Attention *a, int32_t threads) {
  if (a->rows * a->fed == 0) return;
  const int64_t group = a->heads / a->kv_heads, queries = a->rows * a->fed * group;
  const int64_t work = queries * a->kv_heads * (a->columns[0] + a->columns[1]) * a->size;
  Blocks b = {a, queries, a->fed * group >= SHARED ? MOST : QUERIES};
  while (b.size > QUERIES && a->kv_heads * (queries / b.size) < 4 * threads) b.size /= 2;
  if (queries <= 32 && a->kv_heads >= 2 * threads) b.size = queries; /* those that share a prompt read it one after the other */
  pieces(one_block, &b, (int)(a->kv_heads * ((queries + b.size - 1) / b.size)), work < 1 << 14 ? 1 : threads);
}
