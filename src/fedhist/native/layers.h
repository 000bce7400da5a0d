/* The layers of a small net, row by row, with a batch's examples in the lanes of vector registers. */
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
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

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

enum { CONVOLUTION, MAX_POOL, AVERAGE_POOL, DROPOUT, CHANNEL_DROPOUT };
enum { IDENTITY, RELU, TANH };
enum { CROSS_ENTROPY, SQUARED_ERROR, BINARY_CROSS_ENTROPY, HUBER };
enum { SGD, ADAM, ADAMW };

typedef struct {
    int32_t kind, activation;
    int32_t channels, height, width; /* of the input, without padding */
    int32_t out_channels, out_height, out_width;
    int32_t kernel_height, kernel_width, stride_height, stride_width, pad_height, pad_width;
    int64_t weight, bias; /* where they begin in the flat vector; -1 is none */
    int64_t call;         /* dropout: how many calls of a forward pass draw before this one */
    int64_t threshold;    /* 64 random bits from here on keep a value, */
    float scale;          /* which is multiplied by this */
} Layer;

typedef struct {
    const Layer *layers;
    int64_t num_layers, num_parameters, loss;
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
    lanes *images, **values; /* all activations end to end; where each layer's input begins, and the logits */
    lanes *slopes[2];        /* gradients with respect to a layer's output and input, by turns */
    lanes *sums;             /* a convolution's weight gradient, not yet summed over lanes */
    float *transposed;       /* a linear layer's input as [example, feature] */
    float *local, *gradient, *velocity, *squares; /* the last two are Adam's moments, too */
    int32_t *patch, *plane; /* distance of a patch's elements, and of channels, in vectors */
    size_t image_bytes;
} Space;

static size_t larger(size_t a, size_t b) { return a > b ? a : b; }

/* How many of the rows or columns that are left go into the next tile: sizes that WITH_CONSTANTS knows. */
static int next_of(int left, int most) { return left >= most ? most : left >= 4 ? 4 : left >= 2 ? 2 : 1; }

INLINE lanes splat(float value) { return value - (lanes){0}; }

static float sum_of_lanes(lanes value) {
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += value[lane];
    return sum;
}

static int patch_size(const Layer *layer) { return layer->channels * layer->kernel_height * layer->kernel_width; }
static bool is_linear(const Layer *layer) {
    return layer->kind == CONVOLUTION && layer->height * layer->width * layer->kernel_height * layer->kernel_width == 1
           && layer->pad_height + layer->pad_width == 0;
}

/* The input of a layer, margin included. */
static Image input_image(const Layer *layer, int vectors, lanes *at) {
    ptrdiff_t row = (ptrdiff_t)(layer->width + 2 * layer->pad_width) * vectors;
    return (Image){at, row, row * (layer->height + 2 * layer->pad_height)};
}

/* The output of a layer, inside the margin that the next one wants. */
static Image output_image(const Layer *layer, bool last, int vectors, lanes *at) {
    int margin_height = last ? 0 : layer[1].pad_height, margin_width = last ? 0 : layer[1].pad_width;
    ptrdiff_t row = (ptrdiff_t)(layer->out_width + 2 * margin_width) * vectors;
    return (Image){at + margin_height * row + margin_width * vectors, row,
                   row * (layer->out_height + 2 * margin_height)};
}

/* Lay out scratch memory for a batch and return its size in bytes; with `base` 0 that is all it does.
 * What outlives a batch comes first, where it does not move when the next batch has another size. */
static size_t carve(const Net *net, int64_t batch, uintptr_t base, Space *space) {
    size_t used = 0, slope = 0, sums = 0, transposed = 0, table = (size_t)batch;
    size_t flat = (size_t)net->num_parameters * sizeof(float);
    space->vectors = (int)((batch + LANES - 1) / LANES);
#define TAKE(pointer, bytes) (space->pointer = (void *)(base + used), used += ((size_t)(bytes) + 63) / 64 * 64)
    TAKE(local, flat);
    TAKE(gradient, flat);
    TAKE(velocity, flat);
    TAKE(squares, space->adam ? flat : 0);
    TAKE(values, sizeof(lanes *) * (size_t)(net->num_layers + 1));
    TAKE(images, 0);
    for (int64_t l = 0; l <= net->num_layers; l++) {
        const Layer *layer = net->layers + l;
        bool last = l == net->num_layers;
        ptrdiff_t size = last ? layer[-1].out_channels * output_image(layer - 1, true, space->vectors, NULL).plane
                              : layer->channels * input_image(layer, space->vectors, NULL).plane;
        if (base) space->values[l] = (lanes *)(base + used);
        used += ((size_t)size * sizeof(lanes) + 63) / 64 * 64;
        if (l > 0) slope = larger(slope, (size_t)size);
        if (last || layer->kind != CONVOLUTION) continue;
        size_t patch = (size_t)patch_size(layer), channels = (size_t)layer->out_channels;
        table = larger(table, larger(patch, channels));
        if (is_linear(layer)) transposed = larger(transposed, (patch + LANES) * (size_t)batch);
        else sums = larger(sums, patch * channels);
    }
    space->image_bytes = base + used - (uintptr_t)space->images;
    TAKE(slopes[0], slope * sizeof(lanes));
    TAKE(slopes[1], slope * sizeof(lanes));
    TAKE(sums, sums * sizeof(lanes));
    TAKE(transposed, transposed * sizeof(float));
    TAKE(patch, table * sizeof(int32_t));
    TAKE(plane, table * sizeof(int32_t));
#undef TAKE
    return used;
}

/* sum[r][c] += Σ_k weight[r·row_step + k·term_step] · column[c][term[k]] */
INLINE void accumulate(int rows, int columns, lanes sum[ROWS][COLUMNS], const float *weight, ptrdiff_t row_step,
                       ptrdiff_t term_step, int terms, const lanes *const *column, const int32_t *term) {
    for (int k = 0; k < terms; k++, weight += term_step) {
        lanes value[COLUMNS];
        UNROLL for (int c = 0; c < columns; c++) value[c] = column[c][term[k]];
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int c = 0; c < columns; c++) sum[r][c] += splat(weight[r * row_step]) * value[c];
    }
}

typedef struct {
    const float *weight, *bias; /* bias: NULL is none */
    ptrdiff_t row_step, term_step;
    int terms;
    const int32_t *term, *place; /* where the source has its terms, and the target its rows */
    bool add;                    /* to what the target holds */
} Product;

INLINE void product_tile(int rows, int columns, const Product *p, int row, const lanes *const *from,
                         lanes *const *to) {
    lanes sum[ROWS][COLUMNS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < columns; c++) sum[r][c] = splat(p->bias ? p->bias[row + r] : 0);
    accumulate(rows, columns, sum, p->weight + row * p->row_step, p->row_step, p->term_step, p->terms, from, p->term);
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < columns; c++) {
            lanes *target = to[c] + p->place[row + r];
            *target = p->add ? *target + sum[r][c] : sum[r][c]; /* one by one: patches overlap */
        }
}

/* Convolve `in` into row `y` of `out`, or take that row's gradient back to `in`: the same sums of products, of
 * patches for each channel or of channels for each element of a patch. */
static void convolve(const Layer *layer, int y, bool back, const float *weight, const float *bias, Image in, Image out,
                     const Space *space) {
    int vectors = space->vectors, patch = patch_size(layer), channels = layer->out_channels;
    Product product = back ? (Product){weight, NULL, 1, patch, channels, space->plane, space->patch, true}
                           : (Product){weight, bias, patch, 1, patch, space->patch, space->plane, false};
    int rows = back ? patch : channels, run = layer->out_width * vectors;
    for (int n = 0, columns; n < run; n += columns) {
        columns = next_of(run - n, COLUMNS);
        lanes *ins[COLUMNS] = {0}, *outs[COLUMNS] = {0};
        UNROLL for (int c = 0; c < columns; c++) {
            ptrdiff_t x = (n + c) / vectors, vector = (n + c) % vectors;
            ins[c] = in.at + y * layer->stride_height * in.row + x * layer->stride_width * vectors + vector;
            outs[c] = out.at + y * out.row + n + c;
        }
        lanes *const *from = back ? outs : ins, *const *to = back ? ins : outs;
        for (int row = 0, count; row < rows; row += count) {
            count = next_of(rows - row, ROWS);
#define TILE(r, c) product_tile(r, c, &product, row, (const lanes *const *)from, to)
            WITH_CONSTANTS(count, columns, TILE)
#undef TILE
        }
    }
}

INLINE void gradient_tile(int rows, int columns, const Layer *layer, const lanes *in, const lanes *out,
                          const int32_t *patch, const int32_t *plane, int vectors, lanes *sums, ptrdiff_t step) {
    lanes sum[ROWS][COLUMNS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < columns; c++) sum[r][c] = sums[r * step + c];
    for (int x = 0; x < layer->out_width; x++, in += (ptrdiff_t)layer->stride_width * vectors, out += vectors)
        for (int vector = 0; vector < vectors; vector++) {
            lanes value[COLUMNS];
            UNROLL for (int c = 0; c < columns; c++) value[c] = in[patch[c] + vector];
            UNROLL for (int r = 0; r < rows; r++)
                UNROLL for (int c = 0; c < columns; c++) sum[r][c] += out[plane[r] + vector] * value[c];
        }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < columns; c++) sums[r * step + c] = sum[r][c];
}

/* Add what row `y` of output pixels gives to the gradient of all weights. */
static void convolution_gradient(const Layer *layer, int y, Image in, Image out, const Space *space) {
    int patch = patch_size(layer), channels = layer->out_channels;
    const lanes *ins = in.at + y * layer->stride_height * in.row, *outs = out.at + y * out.row;
    for (int row = 0, rows; row < channels; row += rows) {
        rows = next_of(channels - row, ROWS);
        for (int column = 0, columns; column < patch; column += columns) {
            columns = next_of(patch - column, COLUMNS);
            lanes *sums = space->sums + (ptrdiff_t)row * patch + column;
#define TILE(r, c)                                                                                                  \
    gradient_tile(r, c, layer, ins, outs, space->patch + column, space->plane + row, space->vectors, sums, patch)
            WITH_CONSTANTS(rows, columns, TILE)
#undef TILE
        }
    }
}

/* Some outputs' weight gradients for some vectors of features: here lanes are features, and examples are summed. */
INLINE void linear_tile(int rows, int columns, const float *slope, int stride, int examples, const float *input,
                        const int32_t *example, int features, int left, float *gradient) {
    lanes sum[ROWS][COLUMNS];
    const lanes *column[COLUMNS];
    UNROLL for (int c = 0; c < columns; c++) column[c] = (const lanes *)input + c;
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < columns; c++) sum[r][c] = splat(0);
    accumulate(rows, columns, sum, slope, stride, 1, examples, column, example);
    UNROLL for (int r = 0; r < rows; r++, gradient += features) {
        for (int c = 0; c < columns - 1; c++) memcpy(gradient + c * LANES, &sum[r][c], sizeof(lanes));
        int rest = left - (columns - 1) * LANES;
        memcpy(gradient + (columns - 1) * LANES, &sum[r][columns - 1], rest < LANES ? 4 * (size_t)rest : sizeof(lanes));
    }
}

static void linear_gradient(const Layer *layer, Image in, Image out, int examples, const Space *space,
                            float *gradient) {
    int features = layer->channels, vectors = (features + LANES - 1) / LANES, stride = space->vectors * LANES;
    const float *input = (const float *)in.at, *slope = (const float *)out.at;
    for (int f = 0; f < features; f++, input += stride)
        for (int e = 0; e < examples; e++) space->transposed[(ptrdiff_t)e * vectors * LANES + f] = input[e];
    for (int e = 0; e < examples; e++) space->patch[e] = e * vectors;
    for (int column = 0, columns; column < vectors; column += columns) {
        columns = next_of(vectors - column, COLUMNS);
        int first = column * LANES;
        for (int row = 0, rows; row < layer->out_channels; row += rows) {
            rows = next_of(layer->out_channels - row, ROWS);
#define TILE(r, c)                                                                                                  \
    linear_tile(r, c, slope + (ptrdiff_t)row * stride, stride, examples, space->transposed + first, space->patch,   \
                features, features - first, gradient + (ptrdiff_t)row * features + first)
            WITH_CONSTANTS(rows, columns, TILE)
#undef TILE
        }
    }
}

/* Pool windows of `in` into row `y` of `out`; or, given that row's gradient, add it to that of `in`. A window's
 * gradient goes to its first maximum, as in PyTorch. Where ReLU has since changed the maximum, it is zero anyway. */
static void pool(const Layer *layer, int y, bool back, Image in, Image out, Image in_slope, Image out_slope,
                 int vectors) {
    int width = vectors * LANES, taps = layer->kernel_height * layer->kernel_width;
    float share = 1 / (float)taps;
    for (int channel = 0; channel < layer->channels; channel++)
        for (int x = 0; x < layer->out_width; x++) {
            ptrdiff_t corner = channel * in.plane + y * layer->stride_height * in.row
                               + (ptrdiff_t)x * layer->stride_width * vectors;
            ptrdiff_t pixel = channel * out.plane + y * out.row + (ptrdiff_t)x * vectors;
            float *restrict pooled = (float *)(out.at + pixel);
            float *restrict slope = (float *)(out_slope.at + pixel);
            for (int tap = 0; tap < taps; tap++) {
                ptrdiff_t place = corner + tap / layer->kernel_width * in.row
                                  + (ptrdiff_t)(tap % layer->kernel_width) * vectors;
                const float *restrict value = (const float *)(in.at + place);
                float *restrict target = (float *)(in_slope.at + place);
                if (layer->kind == AVERAGE_POOL && back)
                    for (int i = 0; i < width; i++) target[i] += slope[i] * share;
                else if (layer->kind == AVERAGE_POOL)
                    for (int i = 0; i < width; i++) pooled[i] = (tap ? pooled[i] : 0) + value[i] * share;
                else if (back)
                    for (int i = 0; i < width; i++) {
                        bool first = value[i] == pooled[i];
                        target[i] += first ? slope[i] : 0;
                        slope[i] = first ? 0 : slope[i];
                    }
                else
                    for (int i = 0; i < width; i++)
                        pooled[i] = !tap || value[i] > pooled[i] || value[i] != value[i] ? value[i] : pooled[i];
            }
        }
}

/* Apply a layer's activation to row `y` of its output, or its derivative to that row's gradient. */
static void activate(const Layer *layer, int y, bool back, Image out, Image slope, int vectors) {
    int run = layer->out_width * vectors * LANES;
    for (int channel = 0; layer->activation != IDENTITY && channel < layer->out_channels; channel++) {
        ptrdiff_t row = channel * out.plane + y * out.row;
        float *restrict value = (float *)(out.at + row), *restrict change = (float *)(slope.at + row);
        /* Comparisons are such that NaN goes through. */
        if (layer->activation == RELU && !back)
            for (int i = 0; i < run; i++) value[i] = value[i] <= 0 ? 0 : value[i];
        else if (layer->activation == RELU)
            for (int i = 0; i < run; i++) change[i] = value[i] <= 0 ? 0 : change[i];
        else if (!back)
            for (int i = 0; i < run; i++) value[i] = tanhf(value[i]);
        else
            for (int i = 0; i < run; i++) change[i] *= 1 - value[i] * value[i];
    }
}
