/* A small net, and how its values lie in memory, with a batch's examples in the lanes of vector registers. */
#pragma once
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* A tile of ROWS × COLUMNS sums fills the vector registers, 32 or 16, with some left for the factors. */
#if defined(__AVX512F__)
enum { LANES = 16, ROWS = 6, COLUMNS = 4 };
#elif defined(__AVX__)
enum { LANES = 8, ROWS = 6, COLUMNS = 2 };
#elif defined(__aarch64__)
enum { LANES = 4, ROWS = 6, COLUMNS = 4 };
#else
enum { LANES = 4, ROWS = 6, COLUMNS = 2 };
#endif
typedef float lanes __attribute__((vector_size(4 * LANES)));
/* About as many vectors of a channel as are used while they are cached: for weight gradients, and of Winograd's tiles,
 * which have SIDE × SIDE places and pay from FEWEST channels on. */
enum { STRETCH = 256, TILES = 32, SIDE = 4, PLACES = SIDE * SIDE, FEWEST = 8 };
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

/* Keep a vector in a register that GCC would load again for each of its uses. */
#if defined(__x86_64__)
#define KEEP(vector) __asm__("" : "+v"(vector))
#else
#define KEEP(vector)
#endif

/* Run TILE(rows, columns) with both as constants, so that its sums stay in registers. */
#define WITH_COLUMNS(rows, columns, TILE)                                                                           \
    switch (columns) {                                                                                              \
    case 1: TILE(rows, 1); break;                                                                                   \
    case 2: TILE(rows, 2); break;                                                                                   \
    default: TILE(rows, COLUMNS);                                                                                   \
    }                                                                                                               \
    break
#define WITH_CONSTANTS(rows, columns, TILE)                                                                         \
    switch (rows) {                                                                                                 \
    case 1: WITH_COLUMNS(1, columns, TILE);                                                                         \
    case 2: WITH_COLUMNS(2, columns, TILE);                                                                         \
    case 4: WITH_COLUMNS(4, columns, TILE);                                                                         \
    default: WITH_COLUMNS(ROWS, columns, TILE);                                                                     \
    }

enum { CONVOLUTION, MAX_POOL, AVERAGE_POOL, DROPOUT, CHANNEL_DROPOUT, SUM, GROUP_NORM, GELU, GELU_TANH };
enum { IDENTITY, RELU, TANH };
enum { CROSS_ENTROPY, SQUARED_ERROR, BINARY_CROSS_ENTROPY, HUBER };
enum { SGD, ADAM, ADAMW };

typedef struct {
    int32_t kind, activation;
    int32_t input, other;            /* value 0 is the net's input, value l + 1 the output of layer l; -1 is none */
    int32_t slot;                    /* where its output's gradient lies in a backward pass */
    int32_t channels, height, width; /* of the input, without padding */
    int32_t out_channels, out_height, out_width;
    int32_t kernel_height, kernel_width, stride_height, stride_width, pad_height, pad_width;
    int32_t groups;       /* of channels that are normalised together */
    int64_t weight, bias; /* where they begin in the flat vector; -1 is none */
    int64_t call;         /* dropout: how many calls of a forward pass draw before this one */
    int64_t threshold;    /* 64 random bits from here on keep a value, */
    float scale;          /* which is multiplied by this */
    float eps;            /* added to a group's variance */
} Layer;

typedef struct {
    const Layer *layers;
    int64_t num_layers, num_slots, num_parameters, loss;
} Net;

typedef struct {
    double lr, momentum, weight_decay, mu;
    int64_t nesterov, adam;
    double beta1, beta2, eps, clip_norm; /* clip_norm: 0 is none */
    uint64_t key;                        /* of what dropout draws */
} Descent;

/* An image of vectors. Rows and planes are counted in vectors. */
typedef struct {
    lanes *at;
    ptrdiff_t row, plane;
} Image;

/* Scratch memory, carved up for batches of so many vectors. */
typedef struct {
    bool adam; /* whether there are squares */
    int vectors;
    lanes *images, **values; /* all values end to end, and where each begins */
    lanes *slopes;           /* the slots of gradients with respect to values, and how long each is */
    size_t slope;
    bool *begun;             /* whether a later layer has left its share in a value's gradient: others add to it */
    lanes *sums;             /* of a norm, not yet summed over lanes */
    lanes *tiles, *out_tiles; /* Winograd's, of a convolution's input and of its output */
    float *filters, *filter_slopes; /* the weights that they are multiplied by, and their gradients */
    float *transposed;       /* a linear layer's input as [example, feature] */
    float *local, *gradient, *velocity, *squares; /* the last two are Adam's moments, too */
    int32_t *patch, *plane; /* distance of a patch's elements, and of channels, in vectors */
    size_t image_bytes;
} Space;

static size_t larger(size_t a, size_t b) { return a > b ? a : b; }

/* How many of the rows or columns that are left go into the next tile: sizes that WITH_CONSTANTS knows. */
static int next_of(int left, int most) { return left >= most ? most : left >= 4 ? 4 : left >= 2 ? 2 : 1; }

INLINE lanes splat(float value) { return value - (lanes){0}; }

INLINE float sum_of_lanes(lanes value) {
    typedef float quarter __attribute__((vector_size(16)));
    quarter parts[LANES / 4], sum;
    memcpy(parts, &value, sizeof parts);
    sum = parts[0];
    UNROLL for (int i = 1; i < LANES / 4; i++) sum += parts[i];
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

static int patch_size(const Layer *layer) { return layer->channels * layer->kernel_height * layer->kernel_width; }
static bool is_linear(const Layer *layer) {
    return layer->kind == CONVOLUTION && layer->height * layer->width * layer->kernel_height * layer->kernel_width == 1
           && layer->pad_height + layer->pad_width == 0;
}

/* Whether a layer is convolved by tiles. */
static bool in_tiles(const Layer *layer) {
    return layer->kind == CONVOLUTION && layer->kernel_height == 3 && layer->kernel_width == 3
           && layer->stride_height == 1 && layer->stride_width == 1 && layer->out_height % 2 == 0
           && layer->out_width % 2 == 0 && layer->channels >= FEWEST && layer->out_channels >= FEWEST;
}

/* A value as images of some height and width. They lie inside the widest margin that a layer wants around them. */
static Image image_of(const Net *net, int64_t value, int height, int width, int vectors, lanes *at) {
    int margin_height = 0, margin_width = 0;
    for (const Layer *layer = net->layers; layer < net->layers + net->num_layers; layer++)
        if (layer->input == value) {
            margin_height = layer->pad_height > margin_height ? layer->pad_height : margin_height;
            margin_width = layer->pad_width > margin_width ? layer->pad_width : margin_width;
        }
    ptrdiff_t row = (ptrdiff_t)(width + 2 * margin_width) * vectors;
    return (Image){at + margin_height * row + margin_width * vectors, row, row * (height + 2 * margin_height)};
}

/* A layer's input from its padding on, or the gradient of it. */
static Image input_image(const Net *net, const Layer *layer, int64_t value, int vectors, lanes *at) {
    Image image = image_of(net, value, layer->height, layer->width, vectors, at);
    image.at -= layer->pad_height * image.row + layer->pad_width * vectors;
    return image;
}

static Image output_image(const Net *net, const Layer *layer, int vectors, lanes *at) {
    return image_of(net, layer - net->layers + 1, layer->out_height, layer->out_width, vectors, at);
}

/* Where a group norm keeps the means and the reciprocal deviations of its groups: behind its output. */
static lanes *statistics(const Net *net, const Layer *layer, int vectors, lanes *at) {
    return at + layer->out_channels * output_image(net, layer, vectors, NULL).plane;
}

/* Where the gradient with respect to a layer's output begins. */
static lanes *slope_at(const Net *net, int64_t value, const Space *space) {
    return space->slopes + space->slope * (size_t)net->layers[value - 1].slot;
}

/* Lay out scratch memory for a batch and return its size in bytes; with `base` 0 that is all it does.
 * What outlives a batch comes first, where it does not move when the next batch has another size. */
static size_t carve(const Net *net, int64_t batch, uintptr_t base, Space *space) {
    size_t used = 0, slope = 0, sums = 0, transposed = 0, table = (size_t)batch, filters = 0, wide = 0, out_wide = 0;
    size_t flat = (size_t)net->num_parameters * sizeof(float);
    space->vectors = (int)((batch + LANES - 1) / LANES);
#define TAKE(pointer, bytes) (space->pointer = (void *)(base + used), used += ((size_t)(bytes) + 63) / 64 * 64)
    TAKE(local, flat);
    TAKE(gradient, flat);
    TAKE(velocity, flat);
    TAKE(squares, space->adam ? flat : 0);
    TAKE(values, sizeof(lanes *) * (size_t)(net->num_layers + 1));
    TAKE(begun, (size_t)(net->num_layers + 1));
    TAKE(images, 0);
    for (int64_t value = 0; value <= net->num_layers; value++) {
        const Layer *layer = net->layers + (value ? value - 1 : 0);
        int channels = value ? layer->out_channels : layer->channels;
        Image image = value ? output_image(net, layer, space->vectors, NULL)
                            : image_of(net, 0, layer->height, layer->width, space->vectors, NULL);
        ptrdiff_t size = channels * image.plane;
        if (value) slope = larger(slope, (size_t)size);
        if (value && layer->kind == GROUP_NORM) size += 2 * layer->groups * space->vectors;
        if (base) space->values[value] = (lanes *)(base + used);
        used += ((size_t)size * sizeof(lanes) + 63) / 64 * 64;
        if (value && layer->kind == GROUP_NORM) sums = larger(sums, 2 * (size_t)space->vectors);
        if (!value || layer->kind != CONVOLUTION) continue;
        size_t patch = (size_t)patch_size(layer);
        table = larger(table, larger(patch, (size_t)channels));
        if (is_linear(layer)) transposed = larger(transposed, (patch + LANES) * (size_t)batch);
        if (!in_tiles(layer)) continue;
        filters = larger(filters, (size_t)layer->channels * (size_t)channels);
        wide = larger(wide, (size_t)layer->channels * (TILES + 1) + 1);
        out_wide = larger(out_wide, (size_t)channels * (TILES + 1) + 1);
    }
    space->image_bytes = base + used - (uintptr_t)space->images;
    space->slope = (slope * sizeof(lanes) + 63) / 64 * 64 / sizeof(lanes);
    TAKE(slopes, space->slope * (size_t)net->num_slots * sizeof(lanes));
    TAKE(sums, sums * sizeof(lanes));
    TAKE(tiles, PLACES * wide * sizeof(lanes));
    TAKE(out_tiles, PLACES * out_wide * sizeof(lanes));
    TAKE(filters, PLACES * filters * sizeof(float));
    TAKE(filter_slopes, PLACES * filters * sizeof(float));
    TAKE(transposed, transposed * sizeof(float));
    TAKE(patch, table * sizeof(int32_t));
    TAKE(plane, table * sizeof(int32_t));
#undef TAKE
    return used;
}
