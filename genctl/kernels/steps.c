/* A list of calls, one after the other, so that nothing stands between them: a pass over few tokens (steps.py). */
#include "lanes.h"
#include "products.h"

/* A call with the sizes of its pass */
typedef struct {
  const Call *call;
  int64_t rows, fed, from, tokens; /* tokens [from, F) of each row; of all rows */
} Sized;

#define TOGETHER 16384 /* numbers of a piece */
IN void sums(const Call *c, int64_t from, int64_t to, const int type) { /* y = x + z factor, each operation rounded to the type */
  const float factor = c->factor;
  if (!c->x)
    for (int64_t i = from; i < to; i++) set(c->y, i, type, get(c->z, i, type) * factor);
  else if (factor == 1.0f)
    for (int64_t i = from; i < to; i++) set(c->y, i, type, get(c->x, i, type) + get(c->z, i, type));
  else
    for (int64_t i = from; i < to; i++) set(c->y, i, type, get(c->x, i, type) + rounded(get(c->z, i, type) * factor, type));
}
static void sum(void *p, int number) {
  const Sized *job = p;
  const Call *c = job->call;
  const int64_t size = job->tokens * c->size, from = (int64_t)number * TOGETHER, to = from + TOGETHER < size ? from + TOGETHER : size;
  FOR_TYPE(c->type, sums, c, from, to)
}

/* The first `turned` features of a head, as rope.py turns them: cosines and sines [N or 1, F, turned] */
IN void turn(const Call *c, const void *x, void *y, int64_t angle, const int type) {
  const int64_t half = c->turned / 2;
  for (int64_t d = 0; d < c->turned; d++) {
    const int64_t partner = c->how ? d ^ 1 : d < half ? d + half : d - half;
    const float a = rounded(get(x, d, type) * get(c->z, angle + d, type), type);
    const float b = rounded(get(x, partner, type) * get(c->w, angle + d, type), type);
    set(y, d, type, a + b);
  }
}
static void token(void *p, int number) { /* the heads of a token, from one place to another */
  const Sized *job = p;
  const Call *c = job->call;
  const int64_t size = c->type == F32 ? 4 : 2, count = job->fed - job->from, n = number / count, f = number % count;
  const int64_t turned = c->kind == TURN ? c->turned : 0, angle = n * c->z_row + f * turned, y_row = c->y_row ? c->y_row : count * c->y_token;
  const int64_t place = c->places ? c->places[n] * y_row + c->places[job->rows + n] * c->y_token : n * y_row + f * c->y_token;
  for (int64_t h = 0; h < c->heads; h++) {
    const char *x = (const char *)c->x + ((n * job->fed + job->from + f) * c->x_token + h * c->x_head) * size;
    char *y = (char *)c->y + (place + h * c->y_head) * size;
    memcpy(y + turned * size, x + turned * size, (size_t)((c->size - turned) * size));
    if (!turned) continue;
    FOR_TYPE(c->type, turn, c, x, y, angle)
  }
}
static void attend(const Attention *a, int64_t rows, int64_t fed, int32_t threads) {
  Attention sized = *a;
  sized.rows = rows, sized.fed = fed, sized.q_row = fed * a->q_token;
  attention(&sized, threads);
}

void run(const Call *calls, int32_t count, int64_t rows, int64_t fed, int64_t keep, int32_t threads) {
  for (const Call *c = calls; c < calls + count; c++) {
    const int64_t from = c->kept ? fed - keep : 0, tokens = rows * (fed - from), many = tokens * c->heads * c->size >= 1 << 15;
    Sized job = {c, rows, fed, from, tokens};
    switch (c->kind) {
    case PRODUCTS: products(c->w, c->how, c->x, c->y, tokens, c->type, threads); break;
    case RMS_NORM: rms_norm(c->x, c->weight, c->eps, c->y, tokens * c->count, c->size, c->type, c->how, threads); break;
    case LAYER_NORM: layer_norm(c->x, c->weight, c->bias, c->eps, c->y, tokens * c->count, c->size, c->period, c->type, threads); break;
    case ACTIVATE: activate(c->how, c->x, c->x_token, c->z, c->z_token, c->y, tokens, c->size, c->type, threads); break;
    case SUM: pieces(sum, &job, (int)((tokens * c->size + TOGETHER - 1) / TOGETHER), threads); break;
    case ATTENTION: attend(c->w, rows, fed, threads); break;
    default: pieces(token, &job, (int)tokens, many ? threads : 1); /* COPY, TURN */
    }
  }
}
