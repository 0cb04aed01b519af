#!/usr/bin/env bash
# Unpack what `wall bundle` packed. The parts lie beside this file; the first argument says where to (default: ~/inference-wall).
# An archive of which no part is here, because only the harness has changed, say, stays as it is over there. Records are never touched.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
target=${1:-$HOME/inference-wall}
mkdir -p "$target"
declare -A replaced=([engine]="site" [harness]="wall inference_wall experiments benchmarks/published" [warm]="")
for archive in engine harness warm; do
    compgen -G "$archive.[0-9]*" >/dev/null || continue
    if ! grep " $archive\.[0-9]*$" SHA256SUMS | sha256sum --check --quiet; then
        echo "error: the $archive archive is not whole" >&2
        echo "remedy: copy its parts and SHA256SUMS here again" >&2
        exit 1
    fi
    for path in ${replaced[$archive]}; do rm -rf "${target:?}/$path"; done
    cat "$archive".[0-9]* | tar --extract --xz --directory "$target"
    echo "unpacked: $archive"
done
echo "ready: $target/wall"
