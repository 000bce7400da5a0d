/* Group normalisation (Wu and He, 2018): statistics of an example are those of a lane. */
#pragma once
#include "pointwise.h"

INLINE lanes reciprocal_root(lanes value) {
    for (int lane = 0; lane < LANES; lane++) value[lane] = 1 / sqrtf(value[lane]);
    return value;
}

/* Add a row of `count` pixels to the mean of `seen` pixels and to their summed squared distances from it. Rows are
 * merged as Chan, Golub and LeVeque (1983) do: one pass over memory, and no difference of large sums. */
INLINE void merge(const lanes *value, int count, int step, float seen, lanes *mean, lanes *squares) {
    lanes sum = splat(0), own = splat(0);
    for (int x = 0; x < count; x++) sum += value[x * step];
    lanes center = sum * splat(1 / (float)count), gap = center - *mean;
    for (int x = 0; x < count; x++) own += (value[x * step] - center) * (value[x * step] - center);
    float share = (float)count / (seen + (float)count);
    *mean += gap * splat(share);
    *squares += own + gap * gap * splat(seen * share);
}

static void normalize(const Layer *layer, const float *weight, const float *bias, Image in, Image out, lanes *kept,
                      int vectors) {
    int size = layer->channels / layer->groups, pixels = layer->height * layer->width;
    for (int group = 0; group < layer->groups; group++, kept += 2 * vectors) {
        lanes *mean = kept, *root = kept + vectors;
        memset(kept, 0, sizeof(lanes) * 2 * (size_t)vectors);
        for (int row = 0; row < size * layer->height; row++) {
            int channel = group * size + row / layer->height, y = row % layer->height;
            const lanes *value = in.at + channel * in.plane + y * in.row;
            for (int v = 0; v < vectors; v++)
                merge(value + v, layer->width, vectors, (float)row * (float)layer->width, mean + v, root + v);
        }
        for (int v = 0; v < vectors; v++)
            root[v] = reciprocal_root(root[v] * splat(1 / (float)(size * pixels)) + splat(layer->eps));
        for (int row = 0; row < size * layer->height; row++) {
            int channel = group * size + row / layer->height, y = row % layer->height;
            const lanes *value = in.at + channel * in.plane + y * in.row;
            lanes *target = out.at + channel * out.plane + y * out.row;
            for (int v = 0; v < vectors; v++) {
                lanes scale = root[v] * splat(weight ? weight[channel] : 1);
                lanes center = mean[v], shift = splat(bias ? bias[channel] : 0);
                for (int n = v; n < layer->width * vectors; n += vectors) target[n] = (value[n] - center) * scale + shift;
            }
            activate_run(layer->activation, false, (float *)target, NULL, layer->width * vectors * LANES);
        }
    }
}

/* Gradients of weights and biases, where there are any, and of the input if `in_slope` has a place. With distances
 * d = x - mean, root r, m pixels in a group and g = weight · out_slope, it is r·(g - Σg/m - d·r²·Σ(g·d)/m). */
static void normalize_back(const Layer *layer, const float *weight, bool add, Image in, Image out, Image in_slope,
                           Image out_slope, const lanes *kept, const Space *space) {
    int size = layer->channels / layer->groups, vectors = space->vectors;
    lanes share = splat(1 / (float)(size * layer->height * layer->width));
    for (int group = 0; group < layer->groups; group++, kept += 2 * vectors) {
        const lanes *mean = kept, *root = kept + vectors;
        lanes *slopes = space->sums, *products = slopes + vectors; /* Σg and Σ(g·d) */
        memset(slopes, 0, sizeof(lanes) * 2 * (size_t)vectors);
        for (int channel = group * size; channel < (group + 1) * size; channel++) {
            lanes biases = splat(0), weights = splat(0), factor = splat(weight ? weight[channel] : 1);
            for (int v = 0; v < vectors; v++) {
                lanes sum = splat(0), product = splat(0);
                for (int y = 0; y < layer->height; y++) {
                    const lanes *value = in.at + channel * in.plane + y * in.row;
                    lanes *slope = out_slope.at + channel * out_slope.plane + y * out_slope.row;
                    if (v == 0)
                        activate_run(layer->activation, true, (float *)(out.at + channel * out.plane + y * out.row),
                                     (float *)slope, layer->width * vectors * LANES);
                    for (int n = v; n < layer->width * vectors; n += vectors) {
                        sum += slope[n];
                        product += slope[n] * (value[n] - mean[v]);
                    }
                }
                slopes[v] += factor * sum;
                products[v] += factor * product;
                biases += sum;
                weights += product * root[v];
            }
            if (layer->bias >= 0) space->gradient[layer->bias + channel] = sum_of_lanes(biases);
            if (layer->weight >= 0) space->gradient[layer->weight + channel] = sum_of_lanes(weights);
        }
        for (int row = 0; in_slope.at && row < size * layer->height; row++) {
            int channel = group * size + row / layer->height, y = row % layer->height;
            const lanes *value = in.at + channel * in.plane + y * in.row;
            const lanes *slope = out_slope.at + channel * out_slope.plane + y * out_slope.row;
            lanes *target = in_slope.at + channel * in_slope.plane + y * in_slope.row;
            for (int v = 0; v < vectors; v++) {
                lanes scale = root[v] * splat(weight ? weight[channel] : 1), shift = root[v] * share * slopes[v];
                lanes pull = root[v] * root[v] * root[v] * share * products[v];
                for (int n = v; n < layer->width * vectors; n += vectors) {
                    lanes change = scale * slope[n] - shift - pull * (value[n] - mean[v]);
                    target[n] = add ? target[n] + change : change;
                }
            }
        }
    }
}
