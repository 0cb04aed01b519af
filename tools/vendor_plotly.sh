#!/usr/bin/env bash
# Refresh the vendored plotly.js bundle: the site must draw without a network, so the bundle lives in the repository.
#
# Usage:  tools/vendor_plotly.sh VERSION      (the version that plotly.py wants: python -c
#                                             "import plotly.offline as o; print(o.get_plotlyjs_version())")
# Needs:  npm and the registry it is configured for. npm checks the package's integrity as it fetches.
# Not:    choosing the bundle. "cartesian" has every trace type that the figures use at a third of the full size.
set -euo pipefail

version=${1:?usage: tools/vendor_plotly.sh VERSION}
package=plotly.js-cartesian-dist-min
here=$(cd "$(dirname "$0")/.." && pwd)
target=$here/inference_wall/site/static/plotly
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

(cd "$scratch" && npm pack --silent "$package@$version" && tar xzf "$package-$version.tgz")
cp "$scratch/package/plotly-cartesian.min.js" "$scratch/package/LICENSE" "$target/"
sed -i -E "s/(\`$package\`) [0-9][0-9a-z.-]*/\1 $version/" "$target/NOTICE"
echo "vendored $package $version; now run the tests, and say in NOTICE which plotly.py it belongs to"
