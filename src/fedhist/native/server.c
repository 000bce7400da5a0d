/* FedHist's passes over its memory: everything a round needs is read once, a block of columns at a time.
 *
 * fedhist/strategies/passes.py says what each pass does. All functions work on the columns from `begin` to `end`
 * of vectors of `size` numbers, so that threads can share the work; sums over columns are for the caller to add.
 */
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
/* Rows of a tensor need not begin at a multiple of a vector. */
typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4)));
enum { BLOCK = 4096, TOGETHER = 4 };

static const lanes *vector(const float *row, int64_t at) { return (const lanes *)(row + at); }

static double sum(lanes total) {
    double result = 0;
    for (int lane = 0; lane < LANES; lane++)
        result += total[lane];
    return result;
}

/* Copy to where nothing will be read soon: past the caches, which would first fetch what is overwritten. */
static void put_away(float *target, const float *source, int64_t count) {
    int64_t at = 0;
#if defined(__AVX__)
    for (; at < count && (uintptr_t)(target + at) % 32; at++)
        target[at] = source[at];
    for (; at + 8 <= count; at += 8)
        _mm256_stream_ps(target + at, _mm256_loadu_ps(source + at));
#endif
    memcpy(target + at, source + at, (count - at) * sizeof(float));
}

/* Add the dots of one row with up to TOGETHER others to `sums`, over `count` columns. */
static void add_dots(const float *row, const float *const *others, int rows, int64_t count, double *sums) {
    lanes total[TOGETHER] = {{0}};
    int64_t at = 0;
    if (rows == TOGETHER) {
        for (; at + LANES <= count; at += LANES) {
            lanes own = *vector(row, at);
            for (int other = 0; other < TOGETHER; other++)
                total[other] += own * *vector(others[other], at);
        }
    } else {
        for (int other = 0; other < rows; other++)
            for (at = 0; at + LANES <= count; at += LANES)
                total[other] += *vector(row, at) * *vector(others[other], at);
    }
    for (int other = 0; other < rows; other++) {
        sums[other] += sum(total[other]);
        for (int64_t rest = count / LANES * LANES; rest < count; rest++)
            sums[other] += (double)row[rest] * others[other][rest];
    }
}

/* Memory may be kept in bfloat16, the upper half of a float. Return a row of it as floats, in `room` if need be. */
static const float *widened(const void *memory, bool half, int64_t at, int64_t count, float *room) {
    if (!half)
        return (const float *)memory + at;
    const uint16_t *row = (const uint16_t *)memory + at;
    for (int64_t column = 0; column < count; column++) {
        const uint32_t bits = (uint32_t)row[column] << 16;
        memcpy(room + column, &bits, sizeof bits);
    }
    return room;
}

static void keep(void *memory, bool half, int64_t at, const float *row, int64_t count) {
    if (!half) {
        put_away((float *)memory + at, row, count);
        return;
    }
    uint16_t *target = (uint16_t *)memory + at;
    for (int64_t column = 0; column < count; column++) {
        uint32_t bits;
        memcpy(&bits, row + column, sizeof bits);
        const bool nan = (bits & 0x7fffffff) > 0x7f800000;
        target[column] = nan ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16; /* to nearest, ties to even */
    }
}

/* A row of `sums` holds, for each upload, its dots with the h past updates, its square and its dot with the fresh
 * sum of the oldest round; the last number is that sum's square. */
void fedhist_sweep(const float *g, const float *weights, const int64_t *slots, const void *history, void *uploads,
                   float *fresh, float *aggregate, double *sums, int64_t half, int64_t now, int64_t oldest,
                   int64_t size, int64_t k, int64_t capacity, int64_t h, int64_t begin, int64_t end) {
    const int64_t width = h + 2;
    float room[TOGETHER][BLOCK];
    for (int64_t start = begin; start < end; start += BLOCK) {
        const int64_t count = end - start < BLOCK ? end - start : BLOCK;
        for (int64_t first = 0; history && first < h; first += TOGETHER) {
            const float *past[TOGETHER];
            const int rows = h - first < TOGETHER ? (int)(h - first) : TOGETHER;
            for (int other = 0; other < rows; other++)
                past[other] = widened(history, half, (first + other) * size + start, count, room[other]);
            for (int64_t i = 0; i < k; i++)
                add_dots(g + i * size + start, past, rows, count, sums + i * width + first);
        }
        float total[BLOCK] = {0};
        for (int64_t i = 0; i < k; i++) {
            const float *row = g + i * size + start;
            add_dots(row, &row, 1, count, sums + i * width + h);
            for (int64_t at = 0; at < count; at++)
                total[at] += weights[i] * row[at];
            if (!uploads)
                continue;
            keep(uploads, half, (now * capacity + i) * size + start, row, count);
            if (slots[i] < h) {
                float *joined = fresh + slots[i] * size + start;
                for (int64_t at = 0; at < count; at++)
                    joined[at] += row[at];
            }
        }
        memcpy(aggregate + start, total, count * sizeof(float));
        if (!uploads)
            continue;
        memset(total, 0, sizeof total);
        for (int64_t i = k; i < capacity; i++) /* a round closed by a deadline */
            keep(uploads, half, (now * capacity + i) * size + start, total, count);
        float *predicted = fresh + oldest * size + start;
        const float *const one = predicted;
        add_dots(predicted, &one, 1, count, sums + capacity * width);
        for (int64_t i = 0; i < capacity; i++) {
            const float *old = widened(uploads, half, (oldest * capacity + i) * size + start, count, room[0]);
            add_dots(old, &one, 1, count, sums + i * width + h + 1);
        }
        memset(predicted, 0, count * sizeof(float)); /* the slot belongs to the next version from here on */
    }
#if defined(__AVX__)
    _mm_sfence(); /* what was put away is seen by whoever reads it after this call */
#endif
}

void fedhist_blend(float *aggregate, const void *history, const float *shares, double *square, int64_t half,
                   int64_t size, int64_t h, int64_t begin, int64_t end) {
    float room[BLOCK];
    for (int64_t start = begin; start < end; start += BLOCK) {
        const int64_t count = end - start < BLOCK ? end - start : BLOCK;
        float *own = aggregate + start;
        for (int64_t slot = 0; slot < h; slot++) {
            if (shares[slot] == 0)
                continue;
            const float *past = widened(history, half, slot * size + start, count, room);
            for (int64_t at = 0; at < count; at++)
                own[at] += shares[slot] * past[at];
        }
        const float *const same = own;
        add_dots(own, &same, 1, count, square);
    }
}

void fedhist_finish(float *aggregate, void *history, const float *scales, int64_t half, int64_t size, int64_t now,
                    int64_t begin, int64_t end) {
    float room[BLOCK];
    for (int64_t start = begin; start < end; start += BLOCK) {
        const int64_t count = end - start < BLOCK ? end - start : BLOCK;
        for (int64_t at = 0; at < count; at++) {
            room[at] = aggregate[start + at] * scales[1];
            aggregate[start + at] *= scales[0];
        }
        if (history)
            keep(history, half, now * size + start, room, count);
    }
#if defined(__AVX__)
    _mm_sfence();
#endif
}
