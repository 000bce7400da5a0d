#!/usr/bin/env bash
# Make what an encrypted deployment needs: a certificate authority, a server certificate, and a key for each node.
# For tests. In production the keys are made where they are used, and only public ones travel.
set -euo pipefail
folder=${1:?usage: secrets.sh FOLDER [NODES] [NAME…], the names the server is reached by}
nodes=${2:-3}
names=("${@:3}")
umask 077
mkdir -p "$folder"
cd "$folder"

alt="DNS:localhost,IP:127.0.0.1"
for name in "${names[@]}"; do alt+=",DNS:$name"; done
openssl req -x509 -newkey rsa:3072 -nodes -days 30 -subj "/CN=fedhist test authority" \
  -addext "basicConstraints=critical,CA:TRUE" -addext "keyUsage=critical,keyCertSign" \
  -keyout ca.key -out ca.crt 2>/dev/null
openssl req -newkey rsa:3072 -nodes -subj "/CN=localhost" -keyout server.key -out server.csr 2>/dev/null
openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 30 -out server.crt \
  -extfile <(printf 'subjectAltName=%s\nextendedKeyUsage=serverAuth\n' "$alt") 2>/dev/null
rm -f server.csr
for ((i = 0; i < nodes; i++)); do
  [ -e "node$i" ] || ssh-keygen -q -t ecdsa -b 384 -N "" -C "node$i" -f "node$i"
done
echo "ca.crt goes to every node, node*.pub to 'flwr supernode register', server.crt and server.key to the SuperLink."
