/* What stands between the products: norms, activations, angles, softmax. Every row is computed alone, in one order. */
#include "lanes.h"
#include "products.h"

typedef struct {
  int kind, type, late;
  int64_t rows, size, period, x_row, up_row, step;
  const void *x, *up;
  const float *weight, *bias;
  float eps;
  void *y, *z;
} Rows;

IN F part32(const float *p, int64_t at, int64_t left) { return part(p, at, left, F32); }
IN F filled(F v, int64_t left, float filler) { /* lanes past the end are no numbers of the row */
  float h[16];
  if (left >= 16) return v;
  st(h, v);
  for (int64_t l = left; l < 16; l++) h[l] = filler;
  return ld(h);
}
static F rounded16(F v, int type) { /* to a stored type and back */
  float h[16];
  if (type == F32) return v;
  st(h, v);
  for (int l = 0; l < 16; l++) h[l] = rounded(h[l], type);
  return ld(h);
}
static void each(Piece work, Rows *r, int threads) { /* pieces of about 16,000 numbers */
  r->step = 16384 / (r->size ? r->size : 1) + 1;
  pieces(work, r, (int)((r->rows + r->step - 1) / r->step), threads);
}
/* A piece of rows, each of which `work` computes */
#define EACH_ROW(work) \
  static void work##_piece(void *p, int number) { \
    const Rows *r = p; \
    for (int64_t row = number * r->step, last = row + r->step < r->rows ? row + r->step : r->rows; row < last; row++) work(r, row); \
  }
#define FOR_NUMBERS for (int64_t k = 0; k < size; k += 16)

IN void rms(const Rows *r, int64_t row) {
  const int64_t size = r->size;
  F sum = all(0);
  FOR_NUMBERS {
    F v = part(r->x, row * size + k, size - k, r->type);
    sum = fma16(v, v, sum);
  }
  const F scale = all(1.0f / sqrtf(tree(sum) / (float)size + r->eps));
  FOR_NUMBERS {
    F v = mul(part(r->x, row * size + k, size - k, r->type), scale);
    if (!r->late) v = rounded16(v, r->type);
    keep(r->y, row * size + k, size - k, mul(v, part32(r->weight, k, size - k)), r->type);
  }
}
EACH_ROW(rms)
void rms_norm(const void *x, const float *weight, float eps, void *y, int64_t rows, int64_t size, int32_t type, int32_t late, int32_t threads) {
  Rows r = {.x = x, .weight = weight, .eps = eps, .y = y, .rows = rows, .size = size, .type = type, .late = late};
  each(rms_piece, &r, threads);
}

IN void layer(const Rows *r, int64_t row) {
  const int64_t size = r->size;
  F sum = all(0), squares = all(0);
  FOR_NUMBERS sum = add(sum, part(r->x, row * size + k, size - k, r->type));
  const F mean = all(tree(sum) / (float)size);
  FOR_NUMBERS {
    const F v = filled(sub(part(r->x, row * size + k, size - k, r->type), mean), size - k, 0);
    squares = fma16(v, v, squares);
  }
  const F scale = all(1.0f / sqrtf(tree(squares) / (float)size + r->eps));
  const int64_t at = row % r->period * size;
  FOR_NUMBERS {
    F v = mul(sub(part(r->x, row * size + k, size - k, r->type), mean), scale);
    if (r->weight) v = mul(v, part32(r->weight, at + k, size - k));
    if (r->bias) v = add(v, part32(r->bias, at + k, size - k));
    keep(r->y, row * size + k, size - k, v, r->type);
  }
}
EACH_ROW(layer)
void layer_norm(const void *x, const float *weight, const float *bias, float eps, void *y, int64_t rows, int64_t size, int64_t period, int32_t type, int32_t threads) {
  Rows r = {.x = x, .weight = weight, .bias = bias, .eps = eps, .y = y, .rows = rows, .size = size, .period = period, .type = type};
  each(layer_piece, &r, threads);
}

enum { SILU, RELU, GELU, GELU_TANH, QUICK_GELU, TANH };
IN F activated(int kind, F v) {
  const F one = all(1.0f), half_v = mul(v, all(0.5f));
  switch (kind) {
  case SILU: return over(v, add(one, exp16(sub(all(0.0f), v))));
  case RELU: return ordered(v, below(v, all(0.0f), all(0.0f), v), v);
  case GELU: return mul(half_v, add(one, erf16(mul(v, all(0.70710678118654752f)))));
  case GELU_TANH: return mul(half_v, add(one, tanh16(mul(all(0.79788456080286536f), fma16(mul(mul(v, v), v), all(0.044715f), v)))));
  case QUICK_GELU: return over(v, add(one, exp16(mul(all(-1.702f), v))));
  default: return tanh16(v);
  }
}
IN void act(const Rows *r, int64_t row) {
  const int64_t size = r->size;
  FOR_NUMBERS {
    F v = activated(r->kind, part(r->x, row * r->x_row + k, size - k, r->type));
    if (r->up) v = mul(rounded16(v, r->type), part(r->up, row * r->up_row + k, size - k, r->type));
    keep(r->y, row * size + k, size - k, v, r->type);
  }
}
EACH_ROW(act)
void activate(int32_t kind, const void *x, int64_t x_row, const void *up, int64_t up_row, void *y, int64_t rows, int64_t size, int32_t type, int32_t threads) {
  Rows r = {.kind = kind, .x = x, .x_row = x_row, .up = up, .up_row = up_row, .y = y, .rows = rows, .size = size, .type = type};
  each(act_piece, &r, threads);
}

/* Cosine and sine of float32 angles, rounded from double: right but for one number in 2^28. No fused multiplication. */
IN void turns(const Rows *r, int64_t row) {
  const float *x = r->x;
  const double t = x[row];
  if (!(t > -1e9 && t < 1e9)) {
    ((float *)r->y)[row] = ((float *)r->z)[row] = NAN;
    return;
  }
  const double n = (t * 0.63661977236758134308 + 6755399441055744.0) - 6755399441055744.0;
  const double a = (t - n * 1.57079632673412561417) - n * 6.07710050650619224932e-11, z = a * a;
  const double s = a + a * z * (-1.66666666666666324348e-01 + z * (8.33333333332248946124e-03 + z * (-1.98412698298579493134e-04 + z * (2.75573137070700676789e-06 + z * (-2.50507602534068634195e-08 + z * 1.58969099521155010221e-10)))));
  const double c = 1.0 - 0.5 * z + z * z * (4.16666666666666019037e-02 + z * (-1.38888888888741095749e-03 + z * (2.48015872894767294178e-05 + z * (-2.75573143513906633035e-07 + z * (2.08757232129817482790e-09 + z * -1.13596475577881948265e-11)))));
  const int q = (int)((int64_t)n & 3);
  ((float *)r->y)[row] = (float)(q == 0 ? c : q == 1 ? -s : q == 2 ? -c : s);
  ((float *)r->z)[row] = (float)(q == 0 ? s : q == 1 ? c : q == 2 ? -s : -c);
}
EACH_ROW(turns)
void angles(const float *x, float *cosines, float *sines, int64_t count, int32_t threads) {
  Rows r = {.x = x, .y = cosines, .z = sines, .rows = count, .size = 64};
  each(turns_piece, &r, threads);
}

/* ln of a positive number, in double: m 2^e with m about 1, and 2 atanh((m - 1) / (m + 1)) */
static double ln(double x) {
  int e;
  double m = frexp(x, &e);
  if (m < 0.70710678118654752) m += m, e--;
  const double s = (m - 1) / (m + 1), z = s * s;
  double p = 0;
  for (int i = 21; i >= 1; i -= 2) p = p * z + 1.0 / i;
  return e * 0.69314718055994530942 + 2 * s * p;
}
IN void logs(const Rows *r, int64_t row) {
  const int64_t size = r->size;
  const float *x = (const float *)r->x + row * r->x_row;
  float *y = (float *)r->y + row * size, h[16];
  F top = all(-INFINITY), sum = all(0), bad = all(0);
  FOR_NUMBERS {
    const F v = filled(part32(x, k, size - k), size - k, -INFINITY);
    top = below(top, v, v, top);
    bad = ordered(v, bad, v);
  }
  float m = highest(top);
  st(h, bad);
  for (int l = 0; l < 16; l++)
    if (h[l] != h[l]) m = NAN;
  FOR_NUMBERS {
    const F e = exp16(sub(filled(part32(x, k, size - k), size - k, -INFINITY), all(m)));
    sum = add(sum, e);
    if (r->kind) keep(y, k, size - k, e, F32);
  }
  const float total = tree(sum);
  const F shift = all(r->kind ? total : (float)ln(total)), largest = all(m); /* two small differences, not one large one */
  FOR_NUMBERS {
    const int64_t left = size - k;
    keep(y, k, left, r->kind ? over(part32(y, k, left), shift) : sub(sub(part32(x, k, left), largest), shift), F32);
  }
}
EACH_ROW(logs)
/* Of logarithms of probabilities, in nats, by parts of 1,024 numbers. What is below e^-103 adds nothing. */
IN void surprise(const Rows *r, int64_t row) {
  const int64_t size = r->size;
  const float *x = (const float *)r->x + row * size;
  F sum = all(0), some = sum;
  FOR_NUMBERS {
    F v = part32(x, k, size - k);
    v = below(v, all(-103.0f), all(0), v);
    some = sub(some, mul(exp16(v), v));
    if (k % 1024 == 1008) sum = add(sum, some), some = all(0);
  }
  ((float *)r->y)[row] = tree(add(sum, some));
}
EACH_ROW(surprise)
void entropy(const float *x, float *y, int64_t rows, int64_t size, int32_t threads) {
  Rows r = {.x = x, .y = y, .rows = rows, .size = size};
  each(surprise_piece, &r, threads);
}
void softmax(int32_t plain, const float *x, int64_t x_row, float *y, int64_t rows, int64_t size, int32_t threads) { /* plain: no logarithm */
  Rows r = {.kind = plain, .x = x, .x_row = x_row, .y = y, .rows = rows, .size = size};
  each(logs_piece, &r, threads);
}

/* Number k of a block in a file of GGUF, less what is above 4 bits: blocks of 32 have the lower halves of 16 bytes first, then the
   upper ones; those of 256 of 32 bytes in turn, and of 64 bytes with 6 bits. */
static int code_of(const uint8_t *block, const Layout *how, int k) {
  const int run = how->numbers == 32 ? 16 : how->bits == 6 ? 64 : 32;
  const int low = block[how->low + k / (2 * run) * run + k % run] >> k / run % 2 * 4 & 15;
  const uint8_t *high = block + how->high;
  if (how->bits == 4) return low;
  if (how->bits == 6) return low | (high[k / 128 * 32 + k % 32] >> k % 128 / 32 * 2 & 3) << 4;
  return low | (how->numbers == 32 ? high[k / 8] >> k % 8 & 1 : high[k % 32] >> k / 32 & 1) << 4;
}
/* Scale or offset number g of Q4_K and Q5_K, in 6 bits */
static int six_bits(const uint8_t *at, int g, int offset) {
  if (g < 4) return at[4 * offset + g] & 63;
  return (offset ? at[4 + g] >> 4 : at[4 + g] & 15) | at[4 * offset + g - 4] >> 6 << 4;
}
int32_t unpack(const Layout *how, const uint8_t *raw, int64_t out, int64_t in, const int64_t *rows, int64_t count, float *y) {
  const int type = how->scales == SHORTS ? BF16 : F16, single = how->scales == HALVES || how->scales == SIXTEENS;
  const int middle = how->bits == 8 || how->scales == RANGES || how->scales == SIXES ? 0 : 1 << (how->bits - 1);
  for (int64_t row = 0; row < count; row++) {
    if (rows[row] < 0 || rows[row] >= out) return 0;
    const uint8_t *block = raw + rows[row] * (in / how->numbers) * how->bytes;
    for (int64_t left = in / how->numbers; left > 0; left--, block += how->bytes) {
      uint16_t halves[2] = {0};
      memcpy(halves, block + how->halves, single ? 2 : 4);
      const float scale = get(halves, 0, type), offset = get(halves, 1, type);
      for (int k = 0; k < how->numbers; k++) {
        const float code = (float)((how->bits == 8 ? (int8_t)block[how->low + k] : code_of(block, how, k)) - middle);
        float by = scale, more = offset;
        if (how->scales == SIXES) by *= (float)six_bits(block + 4, k / 32, 0), more = -more * (float)six_bits(block + 4, k / 32, 1);
        if (how->scales == SIXTEENS) by *= (float)(int8_t)block[192 + k / 16];
        *y++ = single ? code * by : code * by + more;
      }
    }
  }
  return 1;
}
