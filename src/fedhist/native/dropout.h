/* Dropout whose masks are a function of keys: the numbers of noise.py, so that all trainers drop the same values. */
#pragma once
#include "layers.h"

typedef uint64_t words __attribute__((vector_size(8 * LANES)));
typedef int64_t signed_words __attribute__((vector_size(8 * LANES)));
typedef int32_t masks __attribute__((vector_size(4 * LANES)));

static const uint64_t GOLDEN = 0x9E3779B97F4A7C15; /* of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) */

/* Turn each word into 64 bits that look independent for different words. Compilers do not find these vectors. */
INLINE void mix(words *x) {
    *x = (*x ^ *x >> 30) * 0xBF58476D1CE4E5B9;
    *x = (*x ^ *x >> 27) * 0x94D049BB133111EB;
    *x ^= *x >> 31;
}

static uint64_t mixed(uint64_t word) {
    words x = {word};
    mix(&x);
    return x[0];
}

static bool drops(const Layer *layer) { return layer->kind == DROPOUT || layer->kind == CHANNEL_DROPOUT; }

/* Return what the calls of a step add their own number to: call c's key is keyed(key, 1024·step + c). */
static uint64_t step_key(uint64_t key, int64_t step) {
    return mixed(key * GOLDEN + GOLDEN) + (1024 * (uint64_t)step + 1) * GOLDEN;
}

/* Drop values of row `y`, in a forward pass, or of its gradient: the same mask is drawn again, which is about as fast
 * as to load one. It is counted in the order of PyTorch's tensor, [example, channel, row, column]. */
static void drop(const Layer *layer, int y, uint64_t key, bool add, Image from, Image to, int vectors) {
    bool whole = layer->kind == CHANNEL_DROPOUT;
    int pixels = layer->height * layer->width;
    uint64_t start = mixed(mixed(key + (uint64_t)layer->call * GOLDEN));
    uint64_t step = GOLDEN * (uint64_t)layer->channels * (uint64_t)(whole ? 1 : pixels);
    words examples;
    for (int lane = 0; lane < LANES; lane++) examples[lane] = (uint64_t)lane * step;
    for (int channel = 0; channel < layer->channels; channel++)
        for (int x = 0; x < layer->width; x++) {
            int64_t place = whole ? channel : (int64_t)channel * pixels + y * layer->width + x;
            words count = start + (uint64_t)place * GOLDEN + examples;
            const lanes *value = from.at + channel * from.plane + y * from.row + (ptrdiff_t)x * vectors;
            lanes *target = to.at + channel * to.plane + y * to.row + (ptrdiff_t)x * vectors;
            for (int vector = 0; vector < vectors; vector++, count += LANES * step) {
                words bits = count;
                mix(&bits);
                masks kept = __builtin_convertvector((signed_words)bits >= layer->threshold, masks);
                /* A product, through which NaN goes, as in PyTorch. */
                lanes result = value[vector] * (lanes)(kept & (masks)splat(layer->scale));
                target[vector] = add ? target[vector] + result : result;
            }
        }
}
