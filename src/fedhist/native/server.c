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
enum { BLOCK = 1024, TOGETHER = 4 };

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

/* A row of `sums` holds, for each upload, its dots with the h past updates, its square and its dot with the fresh
 * sum of the oldest round; the last number is that sum's square. */
void fedhist_sweep(const float *g, const float *weights, const int64_t *slots, const float *history, float *uploads,
                   float *fresh, float *aggregate, double *sums, int64_t now, int64_t oldest, int64_t size, int64_t k,
                   int64_t capacity, int64_t h, int64_t begin, int64_t end) {
    for (int64_t start = begin; start < end; start += BLOCK) {
        const int64_t count = end - start < BLOCK ? end - start : BLOCK;
        float total[BLOCK] = {0};
        for (int64_t i = 0; i < k; i++) {
            const float *row = g + i * size + start;
            double *own = sums + i * (h + 2);
            add_dots(row, &row, 1, count, own + h);
            for (int64_t first = 0; history && first < h; first += TOGETHER) {
                const float *past[TOGETHER];
                const int rows = h - first < TOGETHER ? (int)(h - first) : TOGETHER;
                for (int other = 0; other < rows; other++)
                    past[other] = history + (first + other) * size + start;
                add_dots(row, past, rows, count, own + first);
            }
            for (int64_t at = 0; at < count; at++)
                total[at] += weights[i] * row[at];
            if (!uploads)
                continue;
            put_away(uploads + (now * capacity + i) * size + start, row, count);
            if (slots[i] < h) {
                float *joined = fresh + slots[i] * size + start;
                for (int64_t at = 0; at < count; at++)
                    joined[at] += row[at];
            }
        }
        memcpy(aggregate + start, total, count * sizeof(float));
        if (!uploads)
            continue;
        for (int64_t i = k; i < capacity; i++) /* a round closed by a deadline */
            memset(uploads + (now * capacity + i) * size + start, 0, count * sizeof(float));
        float *predicted = fresh + oldest * size + start;
        const float *const one = predicted;
        add_dots(predicted, &one, 1, count, sums + capacity * (h + 2));
        for (int64_t i = 0; i < capacity; i++)
            add_dots(uploads + (oldest * capacity + i) * size + start, &one, 1, count, sums + i * (h + 2) + h + 1);
        memset(predicted, 0, count * sizeof(float)); /* the slot belongs to the next version from here on */
    }
#if defined(__AVX__)
    _mm_sfence(); /* what was put away is seen by whoever reads it after this call */
#endif
}

void fedhist_blend(float *aggregate, const float *history, const float *shares, double *square, int64_t size,
                   int64_t h, int64_t begin, int64_t end) {
    for (int64_t start = begin; start < end; start += BLOCK) {
        const int64_t count = end - start < BLOCK ? end - start : BLOCK;
        float *own = aggregate + start;
        for (int64_t slot = 0; slot < h; slot++) {
            const float *past = history + slot * size + start;
            if (shares[slot] != 0)
                for (int64_t at = 0; at < count; at++)
                    own[at] += shares[slot] * past[at];
        }
        const float *const same = own;
        add_dots(own, &same, 1, count, square);
    }
}

void fedhist_finish(float *aggregate, float *kept, const float *scales, int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; at++) {
        const float value = aggregate[at];
        if (kept)
            kept[at] = value * scales[1];
        aggregate[at] = value * scales[0];
    }
}
