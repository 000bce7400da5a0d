/* Convolutions, and linear layers as convolutions of 1×1 images, row by row. */
#pragma once
#include "layers.h"

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

/* All rows of products for some columns. */
static void products(const Product *product, int rows, int columns, lanes *const *ins, lanes *const *to) {
    const lanes *const *from = (const lanes *const *)ins;
    for (int row = 0, count; row < rows; row += count) {
        count = next_of(rows - row, ROWS);
#define TILE(r, c) product_tile(r, c, product, row, from, to)
        WITH_CONSTANTS(count, columns, TILE)
#undef TILE
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
        products(&product, rows, columns, back ? outs : ins, back ? ins : outs);
    }
}

/* Rows of pixels, as stretches whose vectors lie end to end in input and output. */
typedef struct {
    int height, count, run; /* rows; stretches of a row; vectors of a stretch */
    ptrdiff_t in_row, in_step, out_row;
} Stretch;

/* gradient[r][c] += Σ over some rows of pixels of out[plane[r]] · in[patch[c]], for `run` vectors at a stretch. */
INLINE void gradient_tile(int rows, int columns, const lanes *in, const lanes *out, const Stretch *s,
                          const int32_t *patch, const int32_t *plane, float *gradient, ptrdiff_t step) {
    lanes sum[ROWS][COLUMNS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < columns; c++) sum[r][c] = splat(0);
    for (int y = 0; y < s->height; y++)
        for (int x = 0; x < s->count; x++) {
            const lanes *ins[COLUMNS], *outs[ROWS];
            UNROLL for (int c = 0; c < columns; c++) ins[c] = in + y * s->in_row + x * s->in_step + patch[c];
            UNROLL for (int r = 0; r < rows; r++) outs[r] = out + y * s->out_row + x * s->run + plane[r];
            for (ptrdiff_t n = 0; n < s->run; n++) {
                lanes value[COLUMNS];
                UNROLL for (int c = 0; c < columns; c++) value[c] = ins[c][n];
                UNROLL for (int r = 0; r < rows; r++) {
                    lanes slope = outs[r][n];
                    KEEP(slope);
                    UNROLL for (int c = 0; c < columns; c++) sum[r][c] += slope * value[c];
                }
            }
        }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < columns; c++) gradient[r * step + c] += sum_of_lanes(sum[r][c]);
}

/* The same for all rows and columns of a gradient. */
static void gradients(int rows, int columns, const lanes *in, const lanes *out, const Stretch *stretch,
                      const Space *space, float *gradient) {
    for (int row = 0, high; row < rows; row += high) {
        high = next_of(rows - row, ROWS);
        for (int column = 0, wide; column < columns; column += wide) {
            wide = next_of(columns - column, COLUMNS);
            float *part = gradient + (ptrdiff_t)row * columns + column;
#define TILE(r, c) gradient_tile(r, c, in, out, stretch, space->patch + column, space->plane + row, part, columns)
            WITH_CONSTANTS(high, wide, TILE)
#undef TILE
        }
    }
}

/* Add what `height` rows of output pixels from row `y` on give to the gradient of all weights. */
static void convolution_gradient(const Layer *layer, int y, int height, Image in, Image out, const Space *space) {
    int vectors = space->vectors;
    bool dense = layer->stride_width == 1; /* a row of pixels is one stretch */
    Stretch stretch = {height, dense ? 1 : layer->out_width, dense ? layer->out_width * vectors : vectors,
                       layer->stride_height * in.row, (ptrdiff_t)layer->stride_width * vectors, out.row};
    gradients(layer->out_channels, patch_size(layer), in.at + y * layer->stride_height * in.row, out.at + y * out.row,
              &stretch, space, space->gradient + layer->weight);
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
    int features = layer->channels, vectors = (features + LANES - 1) / LANES, stride = (int)out.plane * LANES;
    const float *slope = (const float *)out.at;
    for (int f = 0; f < features; f++)
        for (int e = 0; e < examples; e++)
            space->transposed[(ptrdiff_t)e * vectors * LANES + f] = ((const float *)(in.at + f * in.plane))[e];
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
