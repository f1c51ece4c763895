/* Work is cut into pieces, and threads take one after another. Which thread computes a piece changes no bit of it. */
#include "products.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

typedef struct {
  Piece work;
  void *job;
  int count;
  atomic_int next;
} Run;
typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);
static Parallel parallel; /* GOMP_parallel of the OpenMP that is loaded: one pool of threads for everything */
void use_openmp(void *function) { parallel = (Parallel)function; }

static void take(void *p) {
  Run *run = p;
  for (int i; (i = atomic_fetch_add_explicit(&run->next, 1, memory_order_relaxed)) < run->count;) run->work(run->job, i);
}

/* Where there is no OpenMP: threads that sleep until there is work. One caller at a time has them; others work alone. */
#define MOST 63
static struct {
  pthread_mutex_t busy, lock;
  pthread_cond_t begin, end;
  Run *run;
  int started, wanted, working;
  long generation;
} pool = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, PTHREAD_COND_INITIALIZER, NULL, 0, 0, 0, 0};

static void *helper(void *unused) {
  (void)unused;
  pthread_mutex_lock(&pool.lock);
  for (long seen = 0;;) {
    while (pool.generation == seen || pool.wanted == 0) {
      if (pool.generation != seen) seen = pool.generation;
      pthread_cond_wait(&pool.begin, &pool.lock);
    }
    seen = pool.generation;
    pool.wanted--;
    pool.working++;
    Run *run = pool.run;
    pthread_mutex_unlock(&pool.lock);
    take(run);
    pthread_mutex_lock(&pool.lock);
    if (--pool.working == 0) pthread_cond_signal(&pool.end);
  }
  return NULL;
}
static void forget(void) { /* in the child of a fork there are no helpers */
  pthread_mutex_init(&pool.busy, NULL);
  pthread_mutex_init(&pool.lock, NULL);
  pthread_cond_init(&pool.begin, NULL);
  pthread_cond_init(&pool.end, NULL);
  pool.started = pool.wanted = pool.working = 0;
}
static void own_pool(Run *run, int threads) {
  static atomic_flag watched = ATOMIC_FLAG_INIT;
  if (!atomic_flag_test_and_set(&watched)) pthread_atfork(NULL, NULL, forget);
  if (pthread_mutex_trylock(&pool.busy) != 0) {
    take(run);
    return;
  }
  pthread_mutex_lock(&pool.lock);
  int others = threads - 1 < MOST ? threads - 1 : MOST;
  for (pthread_t id; pool.started < others && pthread_create(&id, NULL, helper, NULL) == 0; pool.started++) pthread_detach(id);
  pool.run = run;
  pool.wanted = others < pool.started ? others : pool.started;
  pool.generation++;
  pthread_cond_broadcast(&pool.begin);
  pthread_mutex_unlock(&pool.lock);
  take(run);
  pthread_mutex_lock(&pool.lock);
  pool.wanted = 0; /* late threads are skipped */
  while (pool.working > 0) pthread_cond_wait(&pool.end, &pool.lock);
  pthread_mutex_unlock(&pool.lock);
  pthread_mutex_unlock(&pool.busy);
}

void pieces(Piece work, void *job, int count, int threads) {
  if (threads > count) threads = count;
  if (threads <= 1) {
    for (int i = 0; i < count; i++) work(job, i);
    return;
  }
  Run run = {work, job, count, 0};
  if (parallel) parallel(take, &run, (unsigned)threads, 0);
  else own_pool(&run, threads);
}

#define SLOTS 6
typedef struct {
  void *memory;
  size_t size;
} Slot;
static pthread_key_t key;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static void clear(void *p) {
  Slot *slots = p;
  for (int i = 0; i < SLOTS; i++) free(slots[i].memory);
  free(slots);
}
static void make_key(void) { pthread_key_create(&key, clear); }
void *scratch(int slot, size_t bytes) {
  pthread_once(&once, make_key);
  Slot *slots = pthread_getspecific(key);
  if (!slots) {
    slots = calloc(SLOTS, sizeof *slots);
    if (!slots) abort();
    pthread_setspecific(key, slots);
  }
  Slot *s = slots + slot;
  if (s->size < bytes + 256) {
    free(s->memory);
    s->size = bytes + 256 > 2 * s->size ? bytes + 256 : 2 * s->size;
    s->memory = malloc(s->size);
    if (!s->memory) abort();
  }
  return (void *)(((uintptr_t)s->memory + 63) & ~(uintptr_t)63);
}
